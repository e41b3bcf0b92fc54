"""The words of an HTML page: no scripts, no styles, one line for each block. Used by `http_fetch`."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_SKIPPED = frozenset({"script", "style", "noscript", "template", "svg", "head"})
_BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figure", "footer", "form"}
    | {"h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section"}
    | {"table", "td", "th", "title", "tr", "ul"}
)


def html_to_text(html: str) -> str:
    """Title first, then the body's text. Takes any input: what is no HTML comes out as it is."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    lines = (re.sub(r"[^\S\n]+", " ", line).strip() for line in "".join(reader.parts).split("\n"))
    return "\n".join(line for line in lines if line)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipping: list[str] = []
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _SKIPPED:
            self._skipping.append(tag)
        self._in_title = tag == "title"
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._skipping:  # also ends what was left open inside
            del self._skipping[self._skipping.index(tag) :]
        self._in_title = False
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._skipping or self._in_title:
            self.parts.append(data)
