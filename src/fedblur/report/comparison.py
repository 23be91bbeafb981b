"""Groups of runs side by side. In: groups. Out: mean ± standard deviation over seeds, and a test against the first.

Pairs are runs of one seed: they share data, initial weights and cohorts, so the test looks at their gaps. Without
seeds in common it is Welch's test on two samples. p is what the test gives; nothing is said that it does not show.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from fedblur.report.records import Group

LEVEL = 0.05
FEW = 5  # pairs below which a t-test's own assumption cannot be looked at


@dataclass(frozen=True)
class Versus:
    """A group against the one that it is compared with; figures in percentage points."""

    baseline: str
    n: int  # pairs, or runs of the smaller side where they are not paired
    paired: bool
    difference: float
    low: float  # 95 % interval
    high: float
    p: float | None  # None: all differences are the same, and there is nothing to test

    def words(self, comparisons: int) -> str:
        """What this shows, and what it does not."""
        what = f"{self.n} pairs of one seed" if self.paired else f"{self.n} runs a side, not paired"
        if self.p is None:
            return f"every pair differs by the same {self.difference:+.2f} points ({what}): there is nothing to test"
        shown = self.p < LEVEL / comparisons
        verdict = "differs" if shown else "no difference shown, which does not mean that there is none"
        share = f" (at {LEVEL:g}/{comparisons} for {comparisons} comparisons)" if comparisons > 1 else ""
        caution = (
            f"; {self.n} are few: the test takes differences to be normal, and so few cannot show it"
            if self.n < FEW
            else ""
        )
        return f"{verdict}{share}; t-test, {what}{caution}"


@dataclass(frozen=True)
class Line:
    """One row of the comparison: complete runs only, in percent."""

    group: Group
    seeds: int
    mean: float | None
    spread: float | None  # sample standard deviation; None for one run
    epsilon: float | None  # the largest
    clipped: float | None  # local only
    versus: Versus | None


def compare(groups: Sequence[Group]) -> list[Line]:
    """Each group, with a test against the first group of the same axes."""
    firsts: dict[str, Group] = {}
    lines = []
    for group in groups:
        first = firsts.setdefault(repr(sorted(group.axes.items())), group)
        lines.append(_line(group, None if first is group else versus(first, group)))
    return lines


def _line(group: Group, against: Versus | None) -> Line:
    scores = [100 * score for _, score in _scores(group)]
    summaries = [record.summary for record in group.complete if record.summary is not None]
    shares = [share for summary in summaries if (share := summary["local_only"].get("clipped_share")) is not None]
    return Line(
        group,
        len(scores),
        statistics.mean(scores) if scores else None,
        statistics.stdev(scores) if len(scores) > 1 else None,
        max((float(summary["privacy"]["epsilon"]) for summary in summaries), default=None),
        statistics.mean(shares) if shares else None,
        against,
    )


def _scores(group: Group) -> list[tuple[int | None, float]]:
    return [(record.seed, float(record.summary["accuracy"])) for record in group.complete if record.summary]


def versus(first: Group, other: Group) -> Versus | None:
    """Other less first, in percentage points; None where either has fewer than two runs to compare."""
    a, b = dict(_scores(first)), dict(_scores(other))
    common = sorted(seed for seed in a.keys() & b.keys() if seed is not None)
    if len(common) > 1:
        ours, theirs = [100 * b[seed] for seed in common], [100 * a[seed] for seed in common]
        return _paired(first.name, ours, theirs)
    ours, theirs = [100 * score for _, score in _scores(other)], [100 * score for _, score in _scores(first)]
    if min(len(ours), len(theirs)) < 2:
        return None
    return _welch(first.name, ours, theirs)


def _paired(name: str, ours: list[float], theirs: list[float]) -> Versus:
    gaps = [x - y for x, y in zip(ours, theirs, strict=True)]
    mean = statistics.mean(gaps)
    if max(gaps) - min(gaps) < 1e-9:
        return Versus(name, len(gaps), True, mean, mean, mean, None)
    found = stats.ttest_rel(ours, theirs)
    interval = found.confidence_interval(1 - LEVEL)
    return Versus(name, len(gaps), True, mean, float(interval.low), float(interval.high), float(found.pvalue))


def _welch(name: str, ours: list[float], theirs: list[float]) -> Versus:
    mean, n = statistics.mean(ours) - statistics.mean(theirs), min(len(ours), len(theirs))
    if max(statistics.pstdev(ours), statistics.pstdev(theirs)) < 1e-9:
        return Versus(name, n, False, mean, mean, mean, None)
    found = stats.ttest_ind(ours, theirs, equal_var=False)
    interval = found.confidence_interval(1 - LEVEL)
    p = float(found.pvalue)
    return Versus(name, n, False, mean, float(interval.low), float(interval.high), p if math.isfinite(p) else None)
