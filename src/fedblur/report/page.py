"""Pages: Markdown from a Jinja template, and HTML from that Markdown."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from fedblur.report.text import counted, rounded_up


@dataclass(frozen=True)
class Page:
    """A title, the essence in one line, a warning where there is one, and the whole text."""

    title: str
    lead: str
    notice: str
    markdown: str

    @property
    def sections(self) -> Markup:
        """All sections as HTML, one level below a report's own headings."""
        return to_html(self.markdown[self.markdown.index("\n## ") :], below=2)


def asset(name: str) -> str:
    """Return the text of a template, a style sheet or a script."""
    return files("fedblur.report").joinpath("templates", name).read_text(encoding="utf-8")


@functools.cache
def template(name: str, autoescape: bool = True) -> jinja2.Template:
    """Return a template, compiled once; an unknown name in it is an error. Without `autoescape` it makes Markdown."""
    options = {"autoescape": True} if autoescape else {"finalize": _in_one_cell}
    made = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options)
    made.filters |= {"inline": inline, "epsilon": rounded_up, "counted": counted, "safe_svg": Markup}
    made.filters |= {
        "figure": lambda value, measure: f"{value:.{measure.digits}f}",
        "signed": lambda value, measure: f"{value:+.{measure.digits}f}",
    }
    return made.from_string(asset(name))


def render_markdown(name: str, **values: Any) -> str:
    """Render a template; no value can end its table cell or its line."""
    return template(name, autoescape=False).render(**values).rstrip() + "\n"


def _in_one_cell(value: Any) -> str:
    return " ".join(str(value).splitlines()).replace("|", "\\|")


def html(page: Page) -> str:
    """Return the page as HTML that needs no other file and has a light and a dark look."""
    values = {"title": page.title, "style": Markup(asset("page.css")), "body": to_html(page.markdown)}
    return template("page.html.jinja").render(**values)


def to_html(markdown: str, below: int = 0) -> Markup:
    """Return our own Markdown as HTML, its headings so many levels lower: headings, paragraphs, tables of pairs, lists.

    A line that is bold as a whole is the lead after the title, and the name of a list elsewhere.
    """
    parts = []
    for block in re.split(r"\n{2,}", markdown.strip()):
        level = len(block) - len(block.lstrip("#"))
        if level:
            parts.append(f"<h{level + below}>{inline(block[level + 1 :])}</h{level + below}>")
        elif block.startswith("> **"):
            parts.append(f'<p class="notice">{inline(block[4:-2])}</p>')
        elif block.startswith("| | |"):
            cells = [re.split(r" (?<!\\)\| ", line[2:-2], maxsplit=1) for line in block.splitlines()[2:]]
            rows = "".join(f'<tr><th scope="row">{inline(a)}</th><td>{inline(b)}</td></tr>\n' for a, b in cells)
            parts.append(f'<table class="pairs"><tbody>\n{rows}</tbody></table>')
        elif block.startswith("- "):
            items = "".join(f"<li>{inline(line[2:])}</li>\n" for line in block.splitlines())
            parts.append(f"<ul>\n{items}</ul>")
        elif block.startswith("**") and parts[-1].startswith("<h1"):
            parts.append(f'<p class="lead">{inline(block[2:-2])}</p>')
        elif block.startswith("**"):
            parts.append(f"<h{3 + below}>{inline(block[2:-2])}</h{3 + below}>")
        else:
            parts.append(f"<p>{inline(block)}</p>")
    return Markup("\n".join(parts))


def inline(text: str) -> Markup:
    """Return a line of Markdown as HTML: text between backticks is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text.replace("\\|", "|"))))
