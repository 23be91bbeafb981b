"""Groups of runs compared. In: groups and a metric. Out: means over seeds with their errors, and tests of differences.

Runs of one seed share data, initial weights and cohorts, so they are paired and the test looks at their differences.
Without common seeds it is Welch's test on two samples. The words claim no more than the test shows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from fedblur.core.errors import ConfigError, nearest
from fedblur.learning.metrics.measures import Measure
from fedblur.report.records import Group, as_number, headline

LEVEL = 0.05
FEW = 5  # pairs below which the normality that a t-test assumes cannot be checked


@dataclass(frozen=True)
class Versus:
    """A group compared with another, in the unit in which the metric is shown (accuracy: percentage points)."""

    baseline: str
    n: int  # pairs, or runs of the smaller side where they are not paired
    paired: bool
    difference: float
    error: float  # standard error of the difference
    low: float  # 95 % interval
    high: float
    p: float | None  # None: all differences are equal, so there is no test
    measure: Measure

    def words(self, comparisons: int) -> str:
        """Return what this shows, and what it does not."""
        what = f"{self.n} pairs of equal seeds" if self.paired else f"{self.n} runs each, not paired"
        if self.p is None:
            by = f"{self.difference:+.2f} points" if self.measure.percent else f"{self.difference:+.3f}"
            return f"every pair differs by the same {by} ({what}): nothing to test"
        shown = self.p < LEVEL / comparisons
        better = (self.difference > 0) == self.measure.larger_is_better
        direction = "" if self.measure.larger_is_better else f" and is {'better' if better else 'worse'} (lower)"
        verdict = f"differs{direction}" if shown else "no difference shown, which does not prove that there is none"
        share = f" (at {LEVEL:g}/{comparisons} for {comparisons} comparisons)" if comparisons > 1 else ""
        few = f"; {self.n} are too few to check normality" if self.n < FEW else ""
        return f"{verdict}{share}; t-test, {what}{few}"


@dataclass(frozen=True)
class Line:
    """One row of the comparison: complete runs only, in the unit in which the metric is shown."""

    group: Group
    seeds: int
    mean: float | None
    spread: float | None  # sample standard deviation; None for one run
    epsilon: float | None  # the largest
    clipped: float | None  # local only
    versus: Versus | None
    measure: Measure

    @property
    def error(self) -> float | None:
        """The standard error of the mean; None for one run."""
        return None if self.spread is None else self.spread / math.sqrt(self.seeds)


def compare(groups: Sequence[Group], measure: Measure | None = None, baseline: str | None = None) -> list[Line]:
    """Return each group, with a test against the first group of the same axes, or against the one of this label."""
    measure = measure or headline(groups)
    labels = list(dict.fromkeys(group.label for group in groups))
    if baseline is not None and baseline not in labels:
        raise ConfigError(f"baseline {baseline!r} is no label of the table: {nearest(baseline, labels)}")
    lines = []
    for group in groups:
        first = _baseline(group, groups, baseline)
        scores = [measure.scaled(score) for _, score in _scores(group, measure)]
        summaries = [record.summary for record in group.complete if record.summary is not None]
        shares = [share for summary in summaries if (share := summary.local_only.get("clipped_share")) is not None]
        line = Line(
            group,
            seeds=len(scores),
            mean=statistics.mean(scores) if scores else None,
            spread=statistics.stdev(scores) if len(scores) > 1 else None,
            epsilon=max((summary.privacy.epsilon for summary in summaries), default=None),
            clipped=statistics.mean(shares) if shares else None,
            versus=None if first is None or first is group else versus(first, group, measure),
            measure=measure,
        )
        lines.append(line)
    return lines


def _baseline(group: Group, groups: Sequence[Group], label: str | None) -> Group | None:
    """Return what a group is compared with; a baseline that has not some axis (no noise, say) stands for all of it."""
    if label is None:
        return next((each for each in groups if each.axes == group.axes), None)
    named = [each for each in groups if each.label == label]
    same = next((each for each in named if each.axes == group.axes), None)
    return same or next((each for each in named if each.axes.items() <= group.axes.items()), None)


def _scores(group: Group, measure: Measure) -> list[tuple[int | None, float]]:
    found = ((record.seed, record.result(measure)) for record in group.complete)
    return [(seed, score) for seed, score in found if score is not None]


def versus(first: Group, other: Group, measure: Measure) -> Versus | None:
    """Subtract the first from the other; None where either has fewer than two runs."""
    a, b = dict(_scores(first, measure)), dict(_scores(other, measure))
    common = sorted(seed for seed in a.keys() & b.keys() if seed is not None)
    paired = len(common) > 1
    if paired:
        ours, theirs = ([measure.scaled(side[seed]) for seed in common] for side in (b, a))
        gaps = [x - y for x, y in zip(ours, theirs, strict=True)]
        spread = max(gaps) - min(gaps)
        error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    else:
        ours, theirs = ([measure.scaled(score) for _, score in _scores(side, measure)] for side in (other, first))
        if min(len(ours), len(theirs)) < 2:
            return None
        spread = max(statistics.pstdev(x) for x in (ours, theirs))
        error = math.sqrt(sum(statistics.variance(x) / len(x) for x in (ours, theirs)))
    n = min(len(ours), len(theirs))
    mean = statistics.mean(ours) - statistics.mean(theirs)
    if spread < 1e-9:
        return Versus(first.name, n, paired, mean, 0.0, mean, mean, None, measure)
    found = stats.ttest_rel(ours, theirs) if paired else stats.ttest_ind(ours, theirs, equal_var=False)
    interval, p = found.confidence_interval(1 - LEVEL), float(found.pvalue)
    low, high = float(interval.low), float(interval.high)
    return Versus(first.name, n, paired, mean, error, low, high, p if math.isfinite(p) else None, measure)


@dataclass(frozen=True)
class Curve:
    """One setting over an axis of its table: lines in the order of their place on it."""

    name: str
    points: list[tuple[float, Line]]


def over_axis(lines: Sequence[Line], axis: str) -> tuple[list[Curve], list[tuple[str, Line]]]:
    """Return a curve for each label (with the values of the other axes), and what has no place on the axis, by name.

    Without a place are settings that do not have the axis, and infinite ones: without noise, say.
    """
    curves: dict[str, list[tuple[float, Line]]] = {}
    apart: list[tuple[str, Line]] = []
    for line in lines:
        if line.mean is None:
            continue
        others = {key: value for key, value in line.group.axes.items() if key != axis}
        name = ", ".join([line.group.label, *(f"{symbol(key)} = {value}" for key, value in others.items())])
        place = as_number(line.group.axes.get(axis))
        if place is None:
            apart.append((name, line))
        elif math.isinf(place):
            apart.append((f"{name}, {symbol(axis)} = ∞", line))
        else:
            curves.setdefault(name, []).append((place, line))
    ordered = [Curve(name, sorted(points, key=lambda point: point[0])) for name, points in curves.items()]
    return ordered, apart


def symbol(axis: str) -> str:
    """Return a setting as people write it: ε for `epsilon`."""
    return {"epsilon": "ε", "delta": "δ", "noise_multiplier": "σ", "sample_rate": "p"}.get(axis, axis)
