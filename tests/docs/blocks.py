"""The fenced blocks of a page, each with what the page says about how it is run (docs/reference/blocks.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
BESIDE = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"]
PAPERS = ["papers/beyond/README.md", "papers/cheng2022/README.md"]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")) + BESIDE + PAPERS
_COMMENT = re.compile(
    r"<!--\s*(?P<all>every (?P<language>\w+) block: )?"
    r"(?P<kind>not run|run by|exits with)[: ]\s*(?P<what>.*?)\s*-->"
)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    title: str  # the name of the file that it is
    not_run: str  # why
    run_by: str  # which other test runs it
    status: int  # that its last command exits with
    shows_output: bool  # of the block before it

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: str) -> list[Block]:
    """A page's blocks in order."""
    tokens = MarkdownIt().parse((ROOT / page).read_text())
    blocks: list[Block] = []
    notes: dict[str, str] = {}
    whole_page: dict[str, dict[str, str]] = {}
    fresh = False  # whether nothing stands between the last block and this place
    for token in tokens:
        if token.type == "html_block":
            for found in _COMMENT.finditer(token.content):
                place = whole_page.setdefault(found["language"], {}) if found["all"] else notes
                place[found["kind"]] = found["what"]
        elif token.type == "fence":
            language = token.info.split(" ")[0]
            said = notes or whole_page.get(language, {})
            blocks.append(_block(page, token, said, shows_output=fresh and language == "text" and not said))
            notes, fresh = {}, True
        elif token.type == "inline":
            fresh = False
    return blocks


def _block(page: str, token: Token, said: dict[str, str], shows_output: bool) -> Block:
    title = _TITLE.search(token.info)
    return Block(
        page=page,
        line=token.map[0] + 1,
        language=token.info.split(" ")[0],
        text=token.content,
        title=title[1] if title else "",
        not_run=said.get("not run", ""),
        run_by=said.get("run by", ""),
        status=int(said.get("exits with", 0)),
        shows_output=shows_output,
    )
