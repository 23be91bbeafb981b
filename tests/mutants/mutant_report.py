"""A pytest plugin: what became of each test, as JSON lines, so that an assertion is told apart from a broken import.

`run.py` puts this folder on the path and names the file in MUTANT_REPORT. No package of ours is imported here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note what could not be imported."""
    if report.failed:
        _write(collect=report.nodeid, text=_last_line(str(report.longrepr)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note each phase of a test, and whose error ended it."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        error = call.excinfo.value if call.excinfo and report.failed else None
        kind = "" if error is None else _kind(error)
        _write(
            test=item.nodeid,
            when=report.when,
            outcome=report.outcome,
            kind=kind,
            error=type(error).__name__ if error else "",
            text=str(error).strip().split("\n")[0][:200] if error else "",
        )
    return report


def pytest_sessionfinish() -> None:
    """Note which copy of the package was imported."""
    _write(package=getattr(sys.modules.get("fedblur"), "__file__", None))


def _kind(error: BaseException) -> str:
    """Whose error it is: a test's assertion, one of our own types, or something that merely broke."""
    if isinstance(error, BaseExceptionGroup):  # hypothesis found several
        kinds = {_kind(one) for one in error.exceptions}
        return kinds.pop() if len(kinds) == 1 else "broken"
    if isinstance(error, AssertionError | pytest.fail.Exception):
        return "assertion"
    return "ours" if type(error).__module__.partition(".")[0] == "fedblur" else "broken"


def _last_line(text: str) -> str:
    return text.strip().split("\n")[-1][:200]


def _write(**values: Any) -> None:
    with open(os.environ["MUTANT_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
