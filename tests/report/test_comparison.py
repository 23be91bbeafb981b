"""Mean ± std and the test against the first group, by hand and by scipy."""

from __future__ import annotations

import pytest
from scipy import stats

from fedblur.learning.metrics.measures import ACCURACY
from fedblur.report.comparison import Versus, compare
from fedblur.report.records import Group, Record
from tests.worlds import record_of_a_run

A, B = [0.90, 0.93, 0.92], [0.915, 0.935, 0.94]


def group(label: str, scores: list[float], seeds: list[int | None], **axes: object) -> Group:
    summaries = [record_of_a_run(accuracy=score) for score in scores]
    records = [
        Record("r", label, axes, {"seed": seed}, [], summary) for seed, summary in zip(seeds, summaries, strict=True)
    ]
    return Group(label, axes, records)


def against(a: list[float], b: list[float], seeds_b: list[int | None] | None = None) -> Versus | None:
    first, second = group("a", a, list(range(len(a)))), group("b", b, seeds_b or list(range(len(b))))
    return compare([first, second])[1].versus


def test_compare__mean_and_sample_deviation() -> None:
    line = compare([group("a", A, [0, 1, 2])])[0]
    assert line.mean == pytest.approx(91.6667, abs=1e-3)
    assert line.spread == pytest.approx(1.5275, abs=1e-3)
    assert line.versus is None


def test_compare__pairs_runs_by_their_seed_whatever_their_order() -> None:
    found = against(A, [B[2], B[0], B[1]], [2, 0, 1])
    assert found is not None
    assert found.paired
    assert found.p == pytest.approx(stats.ttest_rel(B, A).pvalue)
    assert found.difference == pytest.approx(100 * (sum(B) - sum(A)) / 3)
    assert found.low < found.difference < found.high


def test_compare__runs_without_a_common_seed_are_two_samples() -> None:
    found = against(A, B, [None, None, None])
    assert found is None or not found.paired  # unseeded runs have no partner
    found = against(A, B, [7, 8, 9])
    assert found is not None
    assert found.p == pytest.approx(stats.ttest_ind(B, A, equal_var=False).pvalue)
    assert "not paired" in found.words(1)


def test_compare__one_run_is_no_test() -> None:
    assert against(A[:1], B[:1]) is None


def test_compare__equal_differences_are_not_tested() -> None:
    found = against([0.5, 0.6], [0.6, 0.7])
    assert found is not None
    assert found.p is None
    assert "nothing to test" in found.words(1)


def test_compare__few_seeds_are_called_few_and_a_missing_difference_is_not_equality() -> None:
    found = against(A, B)
    assert found is not None
    assert "no difference shown, which does not prove that there is none" in found.words(1)
    assert "3 are too few to check normality" in found.words(1)


def test_compare__several_comparisons_share_the_level() -> None:
    found = Versus("a", 10, True, 1.0, 0.4, 0.1, 1.9, 0.03, ACCURACY)
    assert found.words(1).startswith("differs;")
    assert found.words(2).startswith("no difference shown")


def test_compare__rows_of_a_table_are_compared_within_their_axes() -> None:
    groups = [group(label, A, [0, 1, 2], epsilon=eps) for label in "ab" for eps in (2, 4)]
    assert [line.versus and line.versus.baseline for line in compare(groups)] == [
        None, None, "a, epsilon = 2", "a, epsilon = 4",
    ]  # fmt: skip
