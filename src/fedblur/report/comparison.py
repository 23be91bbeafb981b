"""Groups of runs compared. In: groups. Out: mean ± standard deviation over seeds, and a test against the first.

Runs of one seed share data, initial weights and cohorts, so they are paired and the test looks at their differences.
Without common seeds it is Welch's test on two samples. The words claim no more than the test shows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from fedblur.report.records import Group

LEVEL = 0.05
FEW = 5  # pairs below which the normality that a t-test assumes cannot be checked


@dataclass(frozen=True)
class Versus:
    """A group compared with another, in percentage points."""

    baseline: str
    n: int  # pairs, or runs of the smaller side where they are not paired
    paired: bool
    difference: float
    low: float  # 95 % interval
    high: float
    p: float | None  # None: all differences are equal, so there is no test

    def words(self, comparisons: int) -> str:
        """Return what this shows, and what it does not."""
        what = f"{self.n} pairs of equal seeds" if self.paired else f"{self.n} runs each, not paired"
        if self.p is None:
            return f"every pair differs by the same {self.difference:+.2f} points ({what}): nothing to test"
        shown = self.p < LEVEL / comparisons
        verdict = "differs" if shown else "no difference shown, which does not prove that there is none"
        share = f" (at {LEVEL:g}/{comparisons} for {comparisons} comparisons)" if comparisons > 1 else ""
        few = f"; {self.n} are too few to check normality" if self.n < FEW else ""
        return f"{verdict}{share}; t-test, {what}{few}"


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
    """Return each group, with a test against the first group of the same axes."""
    firsts: dict[str, Group] = {}
    lines = []
    for group in groups:
        first = firsts.setdefault(repr(sorted(group.axes.items())), group)
        scores = [100 * score for _, score in _scores(group)]
        summaries = [record.summary for record in group.complete if record.summary is not None]
        shares = [share for summary in summaries if (share := summary.local_only.get("clipped_share")) is not None]
        line = Line(
            group,
            seeds=len(scores),
            mean=statistics.mean(scores) if scores else None,
            spread=statistics.stdev(scores) if len(scores) > 1 else None,
            epsilon=max((summary.privacy.epsilon for summary in summaries), default=None),
            clipped=statistics.mean(shares) if shares else None,
            versus=None if first is group else versus(first, group),
        )
        lines.append(line)
    return lines


def _scores(group: Group) -> list[tuple[int | None, float]]:
    return [(record.seed, record.summary.headline[1]) for record in group.complete if record.summary]


def versus(first: Group, other: Group) -> Versus | None:
    """Subtract the first from the other, in percentage points; None where either has fewer than two runs."""
    a, b = dict(_scores(first)), dict(_scores(other))
    common = sorted(seed for seed in a.keys() & b.keys() if seed is not None)
    paired = len(common) > 1
    if paired:
        ours, theirs = [100 * b[seed] for seed in common], [100 * a[seed] for seed in common]
        gaps = [x - y for x, y in zip(ours, theirs, strict=True)]
        spread = max(gaps) - min(gaps)
    else:
        ours, theirs = [100 * score for _, score in _scores(other)], [100 * score for _, score in _scores(first)]
        spread = max(statistics.pstdev(x) for x in (ours, theirs)) if ours and theirs else 0.0
    n = min(len(ours), len(theirs))
    if n < 2:
        return None
    mean = statistics.mean(ours) - statistics.mean(theirs)
    if spread < 1e-9:
        return Versus(first.name, n, paired, mean, mean, mean, None)
    found = stats.ttest_rel(ours, theirs) if paired else stats.ttest_ind(ours, theirs, equal_var=False)
    interval, p = found.confidence_interval(1 - LEVEL), float(found.pvalue)
    return Versus(
        first.name, n, paired, mean, float(interval.low), float(interval.high), p if math.isfinite(p) else None
    )
