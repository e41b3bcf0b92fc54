"""A JSON reader for what models write: tolerant where only one meaning is possible, else an error.

Accepted beyond JSON: trailing commas, single-quoted strings, raw line breaks and tabs in strings, unknown
escapes (`"\\d"` keeps its backslash), Python's True/False/None. Refused: anything cut off, missing commas
or quotes, unquoted keys, a key given twice, NaN and Infinity.
Invariant: a value comes back only if the text was read to the value's own end; nothing is ever guessed.
General repair libraries close what is open, which would run half a call. Called by the parsers.
"""

from __future__ import annotations

import re
from typing import Any

MAX_DEPTH = 64
MAX_DIGITS = 400

_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORD = re.compile(r"\w+")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_PLAIN = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\", "/": "/"}
_UNICODE = re.compile(r"\\u([0-9a-fA-F]{4})")


class BrokenJson(ValueError):
    """`position` is the index in the text where reading stopped; `cut_off` if that is its end."""

    def __init__(self, why: str, position: int, cut_off: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.position = position
        self.cut_off = cut_off


def read_value(text: str, start: int) -> tuple[Any, int]:
    """The value that begins at or after `start` (white space skipped) and the index after it."""
    reader = JsonReader(text, start)
    return reader.value(depth=0), reader.position


class JsonReader:
    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position

    def value(self, depth: int) -> Any:
        char = self._next("a value")
        if depth > MAX_DEPTH:
            raise BrokenJson(f"more than {MAX_DEPTH} levels are nested", self.position)
        if char == "{":
            return self._object(depth)
        if char == "[":
            return self._list(depth)
        if char in "\"'":
            return self._string(char)
        if match := _WORD.match(self.text, self.position):
            if match[0] in _WORDS:
                self.position = match.end()
                return _WORDS[match[0]]
            if match[0] in ("NaN", "Infinity"):
                raise BrokenJson(f"{match[0]} is not a JSON number", self.position)
        return self._number()

    def _object(self, depth: int) -> dict[str, Any]:
        self.position += 1
        result: dict[str, Any] = {}
        while True:
            char = self._next("a key or }")
            if char == "}":
                self.position += 1
                return result
            if char not in "\"'":
                raise self._unexpected("a key in double quotes or }")
            key_at = self.position
            key = self._string(char)
            if key in result:
                raise BrokenJson(f"the key {key!r} is given twice", key_at)
            self._expect(":", f": after the key {key!r}")
            result[key] = self.value(depth + 1)
            self._comma_or("}")

    def _list(self, depth: int, closer: str = "]") -> list[Any]:
        self.position += 1
        result: list[Any] = []
        while True:
            if self._next(f"a value or {closer}") == closer:
                self.position += 1
                return result
            result.append(self.value(depth + 1))
            self._comma_or(closer)

    def _string(self, quote: str) -> str:
        opened, self.position = self.position, self.position + 1
        parts: list[str] = []
        while True:
            match = _PLAIN[quote].match(self.text, self.position)
            assert match is not None  # the pattern matches the empty string
            parts.append(match[0])
            self.position = match.end()
            if self.position >= len(self.text):
                raise BrokenJson("the string that begins here is never closed", opened, cut_off=True)
            if self.text[self.position] == quote:
                self.position += 1
                return "".join(parts)
            parts.append(self._escape(opened))

    def _escape(self, opened: int) -> str:
        letter = self.text[self.position + 1 : self.position + 2]
        if not letter:
            raise BrokenJson("the string that begins here is never closed", opened, cut_off=True)
        if letter == "u":
            return self._unicode()
        self.position += 2
        return _ESCAPES.get(letter, "\\" + letter)

    def _unicode(self) -> str:
        match = _UNICODE.match(self.text, self.position)
        if match is None:
            raise BrokenJson("\\u needs four hexadecimal digits", self.position)
        code, end = int(match[1], 16), match.end()
        low = _UNICODE.match(self.text, end)
        if 0xD800 <= code < 0xDC00 and low is not None and 0xDC00 <= int(low[1], 16) < 0xE000:
            code = 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
            end = low.end()
        if 0xD800 <= code < 0xE000:
            raise BrokenJson(f"{match[0]} is half a character", self.position)
        self.position = end
        return chr(code)

    def _number(self) -> int | float:
        match = _NUMBER.match(self.text, self.position)
        if match is None:
            raise self._unexpected("a value")
        if len(match[0]) > MAX_DIGITS:
            raise BrokenJson(f"the number has more than {MAX_DIGITS} characters", self.position)
        number = float(match[0]) if match[1] or match[2] else int(match[0])
        if number in (float("inf"), float("-inf")):
            raise BrokenJson("the number is too large", self.position)
        self.position = match.end()
        return number

    def _comma_or(self, closer: str) -> None:
        char = self._next(f", or {closer}")
        if char == ",":
            self.position += 1
        elif char != closer:
            raise self._unexpected(f", or {closer}")

    def _expect(self, char: str, what: str) -> None:
        if self._next(what) != char:
            raise self._unexpected(what)
        self.position += 1

    def _next(self, expected: str) -> str:
        """The next character that is not white space, without consuming it."""
        match = _SPACE.match(self.text, self.position)
        assert match is not None  # the pattern matches the empty string
        self.position = match.end()
        if self.position >= len(self.text):
            raise BrokenJson(f"it ends where {expected} should come", self.position, cut_off=True)
        return self.text[self.position]

    def _unexpected(self, expected: str) -> BrokenJson:
        return BrokenJson(f"{self.text[self.position]!r} stands where {expected} should come", self.position)
