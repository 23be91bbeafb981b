"""What differs between Markdown as repositories show it and as mkdocs reads it: links, and blank lines."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from website.layout import Target, resolve

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]`]|`[^`]*`)*)\]\((?P<link>[^()\s]+)\)")
_FENCED = re.compile(r"^(?P<indent> *)(?P<mark>```+|~~~+).*?^(?P=indent)(?P=mark) *$\n?", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^ *([-*]|\d+\.) ")


def translate(markdown: str, page: str, uri: str) -> str:
    """A page of the repository as the site's page at `uri`."""
    pieces = (text if fenced else _prose(text, page, uri) for text, fenced in _pieces(markdown))
    return "".join(pieces)


def targets(markdown: str, page: str) -> Iterator[Target]:
    """Everything in the repository that a page links to."""
    for text, fenced in _pieces(markdown):
        for match in () if fenced else _LINK.finditer(text):
            target = resolve(match["link"], page, match["text"])
            if target is not None:
                yield target


def _pieces(markdown: str) -> Iterator[tuple[str, bool]]:
    """A page in pieces; fenced blocks are marked, and stay as they are."""
    end = 0
    for match in _FENCED.finditer(markdown):
        yield markdown[end : match.start()], False
        yield match[0], True
        end = match.end()
    yield markdown[end:], False


def _prose(text: str, page: str, uri: str) -> str:
    return _LINK.sub(lambda match: _link(match, page, uri), _with_blank_lines(text))


def _link(match: re.Match[str], page: str, uri: str) -> str:
    target = resolve(match["link"], page, match["text"])
    if target is None:
        return match[0]
    if target.uri is None:  # a folder: the site does not hold it
        return match["text"] if "`" in match["text"] else f"`{target.path}`"
    anchor = f"L{target.line}" if target.line else urlsplit(match["link"]).fragment
    where = posixpath.relpath(target.uri, posixpath.dirname(uri) or ".")
    return f"{match['image']}[{match['text']}]({where}{'#' + anchor if anchor else ''})"


def _with_blank_lines(text: str) -> str:
    """Lists and tables that follow a paragraph at once get the blank line that mkdocs wants."""
    lines: list[str] = []
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        new_list = _ITEM.match(line) and not (_ITEM.match(before) or before.startswith(" "))
        new_table = line[:1] == "|" and before[:1] != "|"
        if before.strip() and (new_list or new_table):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
