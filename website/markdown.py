"""What differs between Markdown as repositories show it and as mkdocs reads it: links, and blank lines."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from website.layout import Target, resolve

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]`]|`[^`]*`)*)\]\((?P<link>[^()\s]+)\)")
_FENCE = re.compile(r"^ *(```+|~~~+)")
_ITEM = re.compile(r"^ *([-*]|\d+\.) ")


def translate(markdown: str, page: str, uri: str) -> str:
    """A page of the repository as the site's page at `uri`."""
    return _outside_fences(_with_blank_lines(markdown), lambda text: _LINK.sub(lambda m: _link(m, page, uri), text))


def targets(markdown: str, page: str) -> Iterator[Target]:
    """Everything in the repository that a page links to."""
    found: list[Target] = []

    def note(text: str) -> str:
        for match in _LINK.finditer(text):
            target = resolve(match["link"], page, match["text"])
            if target is not None:
                found.append(target)
        return text

    _outside_fences(markdown, note)
    yield from found


def _link(match: re.Match[str], page: str, uri: str) -> str:
    target = resolve(match["link"], page, match["text"])
    if target is None:
        return match[0]
    if target.uri is None:  # a folder: the site does not hold it
        return match["text"] if "`" in match["text"] else f"`{target.path}`"
    anchor = f"L{target.line}" if target.line else urlsplit(match["link"]).fragment
    where = posixpath.relpath(target.uri, posixpath.dirname(uri) or ".")
    return f"{match['image']}[{match['text']}]({where}{'#' + anchor if anchor else ''})"


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    lines, fence = [], ""
    for line in markdown.split("\n"):
        mark = _FENCE.match(line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) else fence
            lines.append(line)
            continue
        fence = mark[1] if mark else ""
        lines.append(line if mark else change(line))
    return "\n".join(lines)


def _with_blank_lines(markdown: str) -> str:
    """Lists and tables that follow a paragraph at once get the blank line that mkdocs wants."""
    lines: list[str] = []
    previous = ""

    def part(line: str) -> str:
        nonlocal previous
        starts = (_ITEM.match(line) and not _in_list(previous)) or (line[:1] == "|" and previous[:1] not in ("|", "#"))
        blank = "\n" if starts and previous.strip() else ""
        previous = line
        return blank + line

    lines.append(_outside_fences(markdown, part))
    return "\n".join(lines)


def _in_list(line: str) -> bool:
    return bool(_ITEM.match(line)) or line.startswith(" ")
