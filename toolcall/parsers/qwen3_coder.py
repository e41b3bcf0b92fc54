"""Calls as XML with one tag an argument: the syntax of Qwen3-Coder, Qwen3.5 and Nemotron 3.

    <tool_call>
    <function=calculator>
    <parameter=expression>
    12*7
    </parameter>
    </function>
    </tool_call>

Values carry no quotes, so the tool's schema decides what `3` or `true` is. These models sometimes leave
out `<tool_call>`: `<function=` alone starts a call too. A value cannot hold the syntax's own opening tags:
where one stands before `</parameter>`, the value was never closed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolcall.parsers.calls import MessageSyntax, NotACall, as_json, cut_off, no_call, offer_text, one_call
from toolcall.parsers.thinking import Found, markers, scan
from toolcall.parsers.tolerant_json import BrokenJson, read_value
from toolcall.types import ParsedTurn, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
EXAMPLE = "<tool_call>\n<function=tool>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n</tool_call>"
_MARKERS = markers(OPEN, CLOSE, "<function=", "</function>")
_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>\s*")
_OWN_FUNCTION = re.compile(r"\s*<function=")
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>")
_CUT_TAG = re.compile(r"\s*(?:<[^<>]*)?")
_IN_A_VALUE = re.compile(r"</parameter>|<parameter=|<function=|</function>|<tool_call>|</tool_call>")
_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?|\s*</tool_call>")


class Qwen3CoderParser(MessageSyntax):
    name = "qwen3_coder"
    markers = (OPEN, CLOSE)
    result_tag = "tool_response"

    def parse(self, text: str, *, truncated: bool = False, thinking: bool = False) -> ParsedTurn:
        return scan(text, _MARKERS, lambda match: self._read(text, match, truncated), thinking=thinking)

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(_rendered(call) for call in calls)

    def offer(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        return offer_text(schemas, f"To call one, write\n{EXAMPLE}\nand wait for its result.")

    def _read(self, text: str, marker: re.Match[str], truncated: bool) -> tuple[Sequence[Found], int]:
        if marker[0] in (CLOSE, "</function>"):
            return no_call(marker, f"{marker[0]} without {OPEN} before it; write {EXAMPLE}")
        return one_call(
            marker,
            lambda: self._read_call(text, marker, truncated),
            lambda: _end_of_broken(text, marker),
        )

    def _read_call(self, text: str, marker: re.Match[str], truncated: bool) -> ToolCall:
        position = marker.end() if marker[0] == OPEN else marker.start()
        function = _FUNCTION.match(text, position)
        if function is None:
            if truncated and _CUT_TAG.fullmatch(text, position):
                raise NotACall(cut_off())
            raise NotACall(f"<function=name> should come after {OPEN}; write {EXAMPLE}")
        name, position = function[1], function.end()
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(text, position):
            key = parameter[1]
            if key in arguments:
                raise NotACall(f"the parameter {key!r} is given twice", name)
            value, position = _read_value(text, parameter, truncated, name)
            arguments[key] = self._typed(name, key, value)
        end = _END.match(text, position)
        if end is None:
            if truncated and _CUT_TAG.fullmatch(text, position):
                raise NotACall(cut_off("</function>"), name)
            near = text[position : position + 20]
            place = f"near {near!r}" if near else "at the end"
            raise NotACall(f"<parameter=name> or </function> should come {place}", name)
        return ToolCall("", name, arguments, (marker.start(), end.end()))

    def _typed(self, name: str, key: str, text: str) -> Any:
        """The value that `text` stands for by the schema; text that fits no type is left to validation."""
        parameters = self.schemas.get(name, {}).get("parameters", {})
        schema = parameters.get("properties", {}).get(key)
        types = _types(schema, parameters.get("$defs", {})) if schema is not None else {"string"}
        if types == {"string"}:
            return text
        try:
            value, end = read_value(text, 0)
        except BrokenJson:
            return text
        if text[end:].strip() or ("string" in types and types.isdisjoint(_types_of(value))):
            return text  # `{"a": 1}` for an optional string is the text of a file, say
        return value


def _read_value(text: str, opening: re.Match[str], truncated: bool, name: str) -> tuple[str, int]:
    """A parameter's text without the line break at either end, and where the next tag begins."""
    closing = _IN_A_VALUE.search(text, opening.end())
    if closing is None or closing[0] != "</parameter>":
        if truncated and closing is None:
            raise NotACall(cut_off("</parameter>"), name)
        raise NotACall(f"{opening[0]} is not closed by </parameter>", name)
    value = text[opening.end() : closing.start()]
    after = re.compile(r"\s*").match(text, closing.end())
    return value.removeprefix("\n").removesuffix("\n"), after.end() if after else closing.end()


def _end_of_broken(text: str, marker: re.Match[str]) -> int:
    """After the call's own closing tag, or before the tag that opens the next call."""
    position = marker.end()
    if marker[0] == OPEN and (function := _OWN_FUNCTION.match(text, position)):
        position = function.end()
    while following := _MARKERS.search(text, position):
        if following[0] == CLOSE:
            return following.end()
        if following[0] != "</function>":
            return following.start()
        position = following.end()
    return len(text)


def _types_of(value: Any) -> set[str]:
    """What a schema may say to allow a value that is no text."""
    match value:
        case None:
            return {"null", "any"}
        case bool():
            return {"boolean", "any"}
        case int():
            return {"integer", "number", "any"}
        case float():
            return {"number", "any"}
        case list():
            return {"array", "any"}
        case dict():
            return {"object", "any"}
    return set()


def _types(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int = 8) -> set[str]:
    """The JSON types that a schema allows; {"any"} where it does not say."""
    if "$ref" in schema and depth:
        return _types(definitions.get(str(schema["$ref"]).rpartition("/")[2], {}), definitions, depth - 1)
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices and depth:
        return set().union(*(_types(choice, definitions, depth - 1) for choice in choices))
    declared = schema.get("type")
    if isinstance(declared, list):
        return set(declared)
    if declared is None and all(isinstance(value, str) for value in schema.get("enum", [None])):
        return {"string"}
    return {declared or "any"}


def _rendered(call: ToolCall) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else as_json(value)}\n</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"{OPEN}\n<function={call.name}>\n{parameters}</function>\n{CLOSE}"
