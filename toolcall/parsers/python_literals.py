"""Keyword arguments as Python writes them: `(city="Paris", days=[1, 2], exact=True)`.

Built on the JSON reader, so it accepts the same small slips; tuples read as lists. Anything but literals
given by name is refused: nothing is ever evaluated. Called by the pythonic parser.
"""

from __future__ import annotations

import re
from typing import Any

from toolcall.parsers.tolerant_json import BrokenJson, JsonReader

_KEYWORD = re.compile(r"([^\W\d]\w*)\s*=(?!=)")
_NAME_AT_END = re.compile(r"[^\W\d]\w*\s*\Z")
_HEX = re.compile(r"\\x([0-9a-fA-F]{2})|\\U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})")


def read_keywords(text: str, start: int) -> tuple[dict[str, Any], int]:
    """The arguments after the `(` at `start`, and the index after its `)`. Raises BrokenJson."""
    reader = _PythonReader(text, start + 1)
    return reader.keywords(), reader.position


class _PythonReader(JsonReader):
    def keywords(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while self._next("an argument or )") != ")":
            match = _KEYWORD.match(self.text, self.position)
            if match is None and _NAME_AT_END.match(self.text, self.position):
                raise BrokenJson("it ends where = should come", len(self.text), cut_off=True)
            if match is None:
                raise self._unexpected("name=value or )")
            if match[1] in result:
                raise BrokenJson(f"the argument {match[1]!r} is given twice", self.position)
            self.position = match.end()
            result[match[1]] = self.value(depth=1)
            self._comma_or(")")
        self.position += 1
        return result

    def value(self, depth: int) -> Any:
        if self._next("a value") == "(":
            return self._list(depth, ")")
        return super().value(depth)

    def _string(self, quote: str) -> str:
        if self.text.startswith(quote * 3, self.position):
            return self._long_string(quote * 3)
        return super()._string(quote)

    def _long_string(self, quotes: str) -> str:
        opened, self.position = self.position, self.position + 3
        parts: list[str] = []
        while not self.text.startswith(quotes, self.position):
            char = self.text[self.position : self.position + 1]
            if not char:
                raise BrokenJson("the string that begins here is never closed", opened, cut_off=True)
            if char == "\\":
                parts.append(self._escape(opened))
            else:
                parts.append(char)
                self.position += 1
        self.position += 3
        return "".join(parts)

    def _escape(self, opened: int) -> str:
        if match := _HEX.match(self.text, self.position):
            code = int(match[1] or match[2], 16)
            if 0xD800 <= code < 0xE000:
                raise BrokenJson(f"{match[0]} is half a character", self.position)
            self.position = match.end()
            return chr(code)
        if self.text.startswith("\\\n", self.position):
            self.position += 2
            return ""
        return super()._escape(opened)
