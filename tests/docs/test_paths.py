"""Relative links of every page lead to a file and a heading in it; every path that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT

FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "tools", "papers", "audits", "website")
FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if not {".envs", "__pycache__"} & {*path.parts}
}
ENDS = {path.split("/", cut)[-1] for path in FILES for cut in range(path.count("/") + 1)}
# Files that a reader writes or chooses.
READERS = {"halfway.py", "poisson.py", "noiseless.py", "tanh.py", "task.py", "peers/NAME.py"}
_FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(?:[^\[\]`]|`[^`]*`)*\]\(([^()\s#]*)(?:#([^()\s]*))?\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_URL = re.compile(r"\w+:/?/?[\w.-]+[^\s)]*")
_PATH = re.compile(rf"(?<![\w./-])(?:(?:{'|'.join(FOLDERS)})/[\w./-]*\w|[\w./]+\.py\b)")


def wrong(page: str, text: str) -> list[str]:
    """What a page links to or names and the repository does not have; `ordinal.py` may stand for a/room/ordinal.py."""
    here = (ROOT / page).parent
    links = [(link, anchor) for link, anchor in _LINK.findall(_FENCED.sub("", text)) if ":" not in link]
    named = _PATH.findall(_URL.sub("", _LINK.sub("", text)))
    lost = [
        f"{link}#{anchor}"
        for link, anchor in links
        if anchor and anchor not in anchors(here / link if link else ROOT / page)
    ]
    return [
        *(link for link, _ in links if not (here / link).exists()),
        *lost,
        *(path for path in named if not _is_here(path)),
    ]


def anchors(path: Path) -> set[str]:
    """Return what a page's headings are called in links, by the rule of repositories' web pages."""
    if path.suffix != ".md" or not path.exists():
        return set()
    titles = _HEADING.findall(_FENCED.sub("", path.read_text(encoding="utf-8")))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def _is_here(path: str) -> bool:
    by_number = any(file.startswith(f"{path}-") for file in FILES)  # docs/decisions/0001
    return path in ENDS or (ROOT / path).is_dir() or by_number or bool({path, path.split("/")[-1]} & READERS)


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_page__links_lead_somewhere_and_named_paths_exist(page: str) -> None:
    assert not wrong(page, (ROOT / page).read_text())


def test_decisions__are_all_listed() -> None:
    folder = ROOT / "docs/decisions"
    listed = {link for link, _ in _LINK.findall((folder / "README.md").read_text(encoding="utf-8"))}
    assert {path.name for path in folder.glob("0*.md")} <= listed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](nowhere.md) and [b](../README.md#install)", ["nowhere.md"]),
        ("[a](../README.md#nothing), [b](#stages-and-files), [c](#gone)", ["../README.md#nothing", "#gone"]),
        ("see `src/fedblur/train.py`, or tests/docs/", ["src/fedblur/train.py"]),
        ("`privacy/sampling.py`, `round.py` and `binding.py`", ["binding.py"]),
        ("`python -m tests.docs.renew`, https://example.org/x.py, docs/decisions/0001", []),
    ],
)
def test_page__what_is_missing_is_found(text: str, found: list[str]) -> None:
    assert wrong("docs/tour.md", text) == found
