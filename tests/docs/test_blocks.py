"""Every block of code in README and on the site is run, or says why not; what pages show is what is printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commandline import forgotten_parts
from tests.docs.blocks import PAGES, ROOT, Block, read_blocks
from tests.docs.running import PageRun, compare

WITH_BLOCKS = [page for page in PAGES if read_blocks(page)]
FEW = 15  # blocks that no test runs; raise it only with a reason


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new folder and a terminal of 80 columns; what a page registers and imports from its folder is forgotten."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # as in a clone
    for name, value in {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "MPLBACKEND": "Agg"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = {*sys.modules}
    with forgotten_parts():
        yield tmp_path
    for name in {path.stem for path in tmp_path.glob("*.py")} & ({*sys.modules} - modules):
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_page__every_block_runs_and_prints_what_it_shows(page: str, page_folder: Path) -> None:
    PageRun(page_folder).follow(read_blocks(page))


def test_pages__blocks_that_are_not_run_are_few_and_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block for page in WITH_BLOCKS for block in read_blocks(page)]
    not_run = [block for block in blocks if block.not_run and block.language != "text"]
    with capsys.disabled():
        print(f"\n{len(blocks)} blocks, not run: {len(not_run)}")
        for block in not_run:
            print(f"  {block.where}: {block.not_run}")
    assert len(not_run) <= FEW
    assert all(len(block.not_run) > 10 for block in not_run)


def test_pages__blocks_of_other_tests_are_named_there() -> None:
    """A block that says who runs it: that test exists, and reads that page."""
    others = {(block.page, block.run_by) for page in WITH_BLOCKS for block in read_blocks(page) if block.run_by}
    assert others
    for page, test in others:
        assert Path(page).name in (ROOT / test).read_text(), f"{test} does not read {page}"


def block(language: str, text: str) -> Block:
    return Block("page.md", 1, language, text, "", "", "", 0, shows_output=language == "text")


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        ([block("python", "print('one')\n"), block("text", "two\n")], "shows\ntwo\nbut prints\none"),
        ([block("console", "$ fedblur --version\nfedblur 99\n")], "shows\nfedblur 99"),
        ([block("console", "$ fedblur run --no-such-flag\n…\n")], "exits with 2"),
        ([block("bash", "false\n")], "exits with 1"),
        ([block("toml", "epsilom = 2\n")], "epsilom"),
        ([block("", "make run\n")], "no language"),
    ],
)
def test_page__a_block_that_is_wrong_is_found(blocks: list[Block], complaint: str, page_folder: Path) -> None:
    with pytest.raises(Exception, match=complaint):
        PageRun(page_folder).follow(blocks)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("accuracy  88.33 %", "accuracy  89.40 %   \n", True),
        ("accuracy  88.33 %", "accuracy  85.00 %", False),
        ("ε = 2.00", "ε = 2.01", False),
        ("engine: …\ndone", "engine: one,\nof two\ndone", True),
        ("a …", "b and more", False),
        ("92.78 ± 1.00  3  2.753", "92.10 ± 1.40  3  2.753", True),
        ("92.78 ± 1.00  3  2.753", "92.10 ± 1.40  3  2.754", False),
    ],
)
def test_compare__only_what_is_said_may_differ(shown: str, printed: str, same: bool) -> None:
    if same:
        compare(shown, printed, "here")
    else:
        with pytest.raises(AssertionError, match="here"):
            compare(shown, printed, "here")
