"""A page is Markdown from a template, and HTML from that Markdown; no value can break out of its place."""

from __future__ import annotations

import pytest

from fedblur.report import page as pages
from fedblur.report.page import Page, html, render_markdown, to_html

TEMPLATE = """# Title

**{{ lead }}**

> **careful**

## Section

| | |
|---|---|
| name | {{ value }} |

**Names**

{% for item in items %}
- {{ item }}
{% endfor %}
"""


def rendered(monkeypatch: pytest.MonkeyPatch, value: str) -> str:
    monkeypatch.setattr(pages, "asset", lambda name: TEMPLATE)
    return render_markdown("any", lead="short", value=value, items=["one", "two `code`"])


@pytest.mark.parametrize("value", ["a | b", "a\n\n## b", "a |\n| b | c", "a\r\u2028b", "<script>"])
def test_page__a_value_stays_in_its_cell(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    page = to_html(rendered(monkeypatch, value))
    shown = " ".join(value.splitlines()).replace("<", "&lt;").replace(">", "&gt;")
    assert f'<tr><th scope="row">name</th><td>{shown}</td></tr>' in page
    assert page.count("<tr>") == page.count("<h2>") == 1


def test_page__has_each_part_and_headings_fit_into_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    text = rendered(monkeypatch, "plain")
    page = to_html(text)
    for part in ("<h1>Title</h1>", '<p class="lead">short</p>', '<p class="notice">careful</p>', "<h2>Section</h2>",
                 "<h3>Names</h3>", "<li>one</li>", "<li>two <code>code</code></li>"):  # fmt: skip
        assert part in page
    sections = Page("Title", "short", "careful", text).sections
    assert sections.startswith("<h4>Section</h4>")
    assert "<h5>Names</h5>" in sections


def test_page__as_a_file_needs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    text = rendered(monkeypatch, "plain")
    monkeypatch.undo()
    page = html(Page("<Title>", "short", "", text))
    assert "<title>&lt;Title&gt;</title>" in page
    assert "prefers-color-scheme: dark" in page
    assert "&gt;" not in page[page.index("<style>") : page.index("</style>")]
