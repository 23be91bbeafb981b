"""One page of text and tables, as Markdown or as HTML that needs no other file and has a light and a dark look."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """A heading, perhaps a paragraph, a table of two columns, and lists."""

    heading: str
    text: str
    rows: Rows
    lists: Sequence[tuple[str, Sequence[str]]] = ()


@dataclass(frozen=True)
class Page:
    """A title, the essence in one line, a warning where there is one, and sections."""

    title: str
    lead: str
    notice: str | None
    sections: Sequence[Section]


def markdown(page: Page) -> str:
    parts = [f"# {page.title}", f"**{page.lead}**"]
    if page.notice:
        parts.append(f"> **{page.notice}**")
    for section in page.sections:
        parts.append(f"## {section.heading}")
        if section.text:
            parts.append(section.text)
        if section.rows:
            lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in section.rows]
            parts.append("\n".join(["| | |", "|---|---|", *lines]))
        parts += ["\n".join([f"**{name}**", "", *(f"- {item}" for item in items)]) for name, items in section.lists]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --soft: #5b6168; --line: #d8dce0; --warn: #8a1f11;
  --warnbg: #fdecea; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #16181b; --soft: #a2a9b0; --line: #363b41;
  --warn: #ffb4a8; --warnbg: #3a1a16; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 50rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: .3rem; } h2 { margin-top: 2rem; font-size: 1.15rem; }
.lead { font-size: 1.1rem; font-weight: 600; }
.notice { color: var(--warn); background: var(--warnbg); padding: .7rem 1rem; border-radius: .4rem; font-weight: 600; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; color: var(--soft); width: 11rem; }
th, td { vertical-align: top; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
code { font-size: .92em; }
@media print { body { margin: 0; max-width: none; } }
"""


def html(page: Page) -> str:
    parts = [f"<h1>{escape(page.title)}</h1>", f'<p class="lead">{_inline(page.lead)}</p>']
    if page.notice:
        parts.append(f'<p class="notice">{_inline(page.notice)}</p>')
    for section in page.sections:
        parts.append(f"<h2>{escape(section.heading)}</h2>")
        if section.text:
            parts.append(f"<p>{_inline(section.text)}</p>")
        if section.rows:
            rows = "".join(f"<tr><th>{escape(n)}</th><td>{_inline(v)}</td></tr>\n" for n, v in section.rows)
            parts.append(f"<table>\n{rows}</table>")
        for name, items in section.lists:
            entries = "".join(f"<li>{_inline(item)}</li>\n" for item in items)
            parts.append(f"<h3>{escape(name)}</h3>\n<ul>\n{entries}</ul>")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(page.title)}</title>'
    )
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
