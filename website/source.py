"""Pages of source code with an anchor on every line, for the tour to point at."""

from __future__ import annotations

from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer


def page(path: Path, name: str) -> str:
    """A Python file as a page; line 12 has the anchor L12."""
    marked = highlight(path.read_text(), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    lines = "".join(  # no line breaks between them: each is a block of its own
        f'<span id="L{n}" class="source-line"><a class="source-number" href="#L{n}">{n:4}</a> {line}</span>'
        for n, line in enumerate(marked.rstrip("\n").split("\n"), 1)
    )
    return f'# `{name}`\n\n<div class="highlight source"><pre><code>{lines}</code></pre></div>\n'
