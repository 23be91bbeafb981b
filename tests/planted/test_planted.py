"""Every planted bug is caught by every check that claims to, and no check cries wolf."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedblur.core.errors import FedBlurError
from tests.planted.bugs import BUGS, Bug
from tests.planted.catchers import CATCHERS
from tests.planted.table import PAGE, section, table

# In make test each bug meets the first check that claims to catch it, in make test-long all of them.
PAIRS = [
    pytest.param(bug, name, id=f"{bug.name}-{name}", marks=[pytest.mark.long] if i else [])
    for bug in BUGS
    for i, name in enumerate(bug.catchers)
]


@pytest.mark.parametrize("name", CATCHERS)
def test_check__passes_on_the_code_as_it_is(name: str, tmp_path: Path) -> None:
    """An alarm of its own would be no catch. The worst cases with few repetitions here, with all of them below."""
    (CATCHERS[name].sooner or CATCHERS[name].check)(tmp_path)


IN_FULL = [name for name in CATCHERS if CATCHERS[name].sooner]
BASE = "worst case with sampling"  # has cohorts and noise; the others are for make test-long


@pytest.mark.parametrize("name", [n if n == BASE else pytest.param(n, marks=pytest.mark.long) for n in IN_FULL])
def test_worst_case__passes_in_full_on_the_code_as_it_is(name: str, tmp_path: Path) -> None:
    CATCHERS[name].check(tmp_path)


@pytest.mark.parametrize(("bug", "name"), PAIRS)
def test_planted_bug__is_caught(bug: Bug, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    catcher = CATCHERS[name]
    with pytest.raises(FedBlurError if catcher.kind == "refusal" else AssertionError):
        catcher.catch(tmp_path)


def test_planted_bugs__are_at_least_the_twelve_that_were_asked_for() -> None:
    assert sum(bug.asked for bug in BUGS) >= 12
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert {name for bug in BUGS for name in bug.catchers} == set(CATCHERS)


def test_table__in_the_docs_is_up_to_date() -> None:
    assert section(PAGE.read_text())[1] == table(), "run: python -m tests.planted.table"
