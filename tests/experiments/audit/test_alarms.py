"""The checks do not fire on correct code, with noise from the operating system."""

from __future__ import annotations

import pytest

from benchmarks.audit_alarms import SETTINGS, findings, smallest


@pytest.mark.long
def test_alarms__100_worst_case_checks_of_correct_code_find_nothing() -> None:
    found = findings(100)
    assert len(found) == 100
    assert len(SETTINGS) == 4
    assert not any(one.broken for one in found)
    assert smallest(found) > 1e-5  # of some thousand tests: below that once in a hundred times, by Bonferroni's bound
