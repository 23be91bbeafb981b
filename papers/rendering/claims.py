"""Verdicts on a paper's claims, each by a rule that is stated beside it. In: a document. Out: Verdicts.

Rules decide by means over seeds; none is changed for a result. `chance` is two standard errors of a difference. A
verdict that a change of that size would overturn is marked as not significant. A part with `counts = false` is a side
result and does not decide: the paper's settings and tuned ones are judged apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblur.core.config import canonical, differences, to_dict
from fedblur.core.errors import ConfigError, nearest
from papers.rendering.document import Document
from papers.rendering.gains import Gain, Part, chance, gains, printed_gains, span
from papers.rendering.words import setting, symbol

HOLDS, FAILS, MIXED, OPEN = "holds", "does not hold", "mixed", "not yet measured"


@dataclass(frozen=True)
class Finding:
    """The outcome of one part of a claim."""

    verdict: str
    rule: str
    evidence: str
    narrow: bool = False  # chance could overturn it
    counts: bool = True


def combine(verdicts: Sequence[str]) -> str:
    """Return the common verdict, or mixed; what is not measured has no say."""
    known = {verdict for verdict in verdicts if verdict != OPEN}
    return OPEN if not known else known.pop() if len(known) == 1 else MIXED


def judge(margins: Sequence[float]) -> str:
    """Judge by how far each setting is above what the rule demands."""
    return combine([HOLDS if margin >= 0 else FAILS for margin in margins])


@dataclass(frozen=True)
class Verdict:
    """A claim with what its parts come to."""

    name: str
    says: str
    source: str
    expect: str  # said where nothing is measured
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        return combine([finding.verdict for finding in self.findings if finding.counts])

    @property
    def narrow(self) -> bool:
        return any(finding.narrow for finding in self.findings if finding.counts)

    @property
    def partial(self) -> bool:
        """Return whether some of what decides is not measured."""
        deciding = [finding.verdict for finding in self.findings if finding.counts]
        return OPEN in deciding and self.verdict != OPEN

    @property
    def words(self) -> str:
        notes = [note for holds, note in ((self.narrow, "not significant"), (self.partial, "partly measured")) if holds]
        return self.verdict + (f" ({', '.join(notes)})" if notes else "")


def verdicts(document: Document) -> list[Verdict]:
    """Judge all claims of a paper."""
    return [
        Verdict(
            claim["name"],
            claim["says"],
            claim["source"],
            claim.get("expect", ""),
            tuple(_finding(document, part) for part in claim["parts"]),
        )
        for claim in document.claims
    ]


def _finding(document: Document, part: Part) -> Finding:
    rule = RULES.get(part["rule"])
    if rule is None:
        raise ConfigError(f"claims.toml: rule {part['rule']!r} is unknown: {nearest(part['rule'], RULES)}")
    return rule(document, part)


def gain_rule(document: Document, part: Part) -> Finding:
    """Test: the method gains at least as much as the paper's smallest gain, at every setting."""
    table, method, baseline = part["table"], part["method"], part["baseline"]
    source = document.sources.get(part["table"])
    own = printed_gains(document, source, method, baseline) if source else []
    least = float(part["at_least"]) if "at_least" in part else min(own, default=0.0)
    origin = "" if "at_least" in part or not own else ", the smallest that the paper prints"
    rule = f"`{table}`: {method} gains at least {least:.2f} points over {baseline} at every setting{origin}"
    found = gains(document, table, method, baseline, part)
    if not found:
        return Finding(OPEN, rule, "", counts=part.get("counts", True))
    margins = [gain.points - least for gain in found]
    narrow = any(abs(margin) < chance(document, table, gain.seeds) for margin, gain in zip(margins, found, strict=True))
    evidence = f"{method} over {baseline}: {'; '.join(map(str, found))}"
    evidence += f" (paper: {span(own)})" if own else ""
    return Finding(judge(margins), rule, evidence, narrow, part.get("counts", True))


def trend_rule(document: Document, part: Part) -> Finding:
    """Test: the gain is larger at the smallest value of an axis than at its largest."""
    table, axis = part["table"], part["axis"]
    rule = (
        f"`{table}`: the gain of {part['method']} over {part['baseline']} is larger at the smallest measured "
        f"{symbol(axis)} than at the largest, whatever else varies"
    )
    families: dict[str, list[Gain]] = {}
    for gain in gains(document, table, part["method"], part["baseline"], part):
        others = {name: value for name, value in gain.axes.items() if name != axis}
        families.setdefault(setting(others), []).append(gain)
    margins, words, narrow = [], [], False
    for rest, family in families.items():
        ordered = sorted(family, key=lambda gain: float(gain.axes[axis]))
        if len(ordered) < 2:
            continue
        first, last = ordered[0], ordered[-1]
        margins.append(first.points - last.points)
        narrow |= abs(margins[-1]) < math.sqrt(2) * chance(document, table, min(first.seeds, last.seeds))
        words.append(
            (f"{rest}: " if rest else "")
            + f"{first.points:+.2f} at {setting({axis: first.axes[axis]})}, "
            + f"{last.points:+.2f} at {setting({axis: last.axes[axis]})}"
        )
    if not margins:
        return Finding(OPEN, rule, "", counts=part.get("counts", True))
    return Finding(judge(margins), rule, "; ".join(words), narrow, part.get("counts", True))


def larger_rule(document: Document, part: Part) -> Finding:
    """Test: the gain is larger in one table than in another whose cells differ only in the model."""
    table, than = part["table"], part["than"]
    rule = f"the gain of {part['method']} over {part['baseline']} is larger in `{table}` than in `{than}`, cell by cell"
    theirs = {canonical(gain.axes): gain for gain in gains(document, than, part["method"], part["baseline"], part)}
    margins, words, narrow = [], [], False
    for gain in gains(document, table, part["method"], part["baseline"], part):
        other = theirs.get(canonical(gain.axes))
        if other is None or not _differ_in_model_only(document, table, than, part["method"], gain.axes):
            continue
        margins.append(gain.points - other.points)
        narrow |= abs(margins[-1]) < math.sqrt(2) * chance(document, table, min(gain.seeds, other.seeds))
        words.append(f"{setting(gain.axes)}: {gain.points:+.2f} against {other.points:+.2f}")
    if not margins:
        return Finding(OPEN, rule, "", counts=part.get("counts", True))
    return Finding(judge(margins), rule, "; ".join(words), narrow, part.get("counts", True))


def _differ_in_model_only(document: Document, one: str, other: str, label: str, axes: Mapping[str, Any]) -> bool:
    rows = [document.group(name, label, axes) for name in (one, other)]
    if rows[0] is None or rows[1] is None:
        return False
    a, b = (to_dict(row.cells[0].config) for row in rows if row is not None)
    changed = {line.split(":")[0].split(".")[0] for line in differences(a, b)}
    return changed <= {"model", "seed", "checkpoint_every", "eval_every"}


def synergy_rule(document: Document, part: Part) -> Finding:
    """Test: the second part adds more to the first than to the baseline."""
    table, both, first, second, baseline = (part[key] for key in ("table", "both", "first", "second", "baseline"))
    rule = f"`{table}`: the most that {second} adds to {first} is above 0 and above the most that it adds to {baseline}"
    joint, alone = gains(document, table, both, first, part), gains(document, table, second, baseline, part)
    if not joint or not alone:
        return Finding(OPEN, rule, "", counts=part.get("counts", True))
    best, single = max(joint, key=lambda gain: gain.points), max(alone, key=lambda gain: gain.points)
    margin = min(best.points, best.points - single.points)
    narrow = abs(margin) < math.sqrt(2) * chance(document, table, min(best.seeds, single.seeds))
    evidence = f"{second} adds {best} to {first}, and {single} to {baseline}"
    return Finding(judge([margin]), rule, evidence, narrow, part.get("counts", True))


def norms_rule(document: Document, part: Part) -> Finding:
    """Test: norms before clipping stay below S in most rounds, and scatter less than the baseline's."""
    table, method, baseline = part["table"], part["method"], part["baseline"]
    rule = (
        f"`{table}`: before clipping, in at least half of the rounds, the median norm of {method} is at most S, and "
        f"the distance between its quartiles is smaller than that of {baseline}; mixed if one of the two holds"
    )
    ours, theirs = norms(document, table, method), norms(document, table, baseline)
    rounds = sorted(ours.keys() & theirs.keys())
    if not rounds:
        return Finding(OPEN, rule, "", counts=part.get("counts", True))
    below = [ours[t][2] <= ours[t][-1] for t in rounds]
    steady = [ours[t][3] - ours[t][1] < theirs[t][3] - theirs[t][1] for t in rounds]
    ratio = statistics.median(ours[t][2] / theirs[t][2] for t in rounds)
    over = statistics.median(ours[t][2] / ours[t][-1] for t in rounds)
    evidence = (
        f"median norm at most S in {100 * statistics.mean(below):.0f} % of rounds (typically {over:.1f} × S); less "
        f"scatter in {100 * statistics.mean(steady):.0f} %; median {100 * (ratio - 1):+.0f} % against {baseline}"
    )
    verdict = judge([statistics.mean(share) - 0.5 for share in (below, steady)])
    return Finding(verdict, rule, evidence, counts=part.get("counts", True))


def norms(document: Document, table: str, label: str) -> dict[int, list[float]]:
    """Return, by round, five quantiles of the norm before clipping, then S. The first seed stands for all."""
    row = next((row for row in document.groups(table) if row.label == label and row.results), None)
    if row is None:
        return {}
    return {entry["round"]: [*entry["norm_quantiles"], entry["clip_norm"]] for entry in row.results[0]["norms"]}


def steadier_rule(document: Document, part: Part) -> Finding:
    """Test: accuracy moves less along an axis than the baseline's: `fall`, from best to last, or `range`."""
    table, axis, measure = part["table"], part["axis"], part["measure"]
    how = {"fall": "falls less from its best to that at the largest", "range": "moves less over all measured values of"}
    rule = f"`{table}`: accuracy of {part['method']} {how[measure]} {symbol(axis)} than that of {part['baseline']}"
    lines = [along(document, table, part[key], axis) for key in ("method", "baseline")]
    shared = sorted(lines[0].keys() & lines[1].keys())
    if len(shared) < 3:
        return Finding(OPEN, rule, "", counts=part.get("counts", True))
    moves = []
    for line in lines:
        values = [line[x] for x in shared]
        moves.append(max(values) - (values[-1] if measure == "fall" else min(values)))
    narrow = abs(moves[1] - moves[0]) < math.sqrt(2) * chance(document, table, 1)
    verb = "falls by" if measure == "fall" else "moves by"
    where = f"over {setting({axis: shared[0]})} to {shared[-1]:g}"
    evidence = f"{part['method']} {verb} {moves[0]:.2f} points, {part['baseline']} by {moves[1]:.2f}, {where}"
    above = sum(lines[0][x] > lines[1][x] for x in shared)  # a line may be steady because it is low
    evidence += f"; {part['method']} is the more accurate at {above} of {len(shared)} values"
    return Finding(judge([moves[1] - moves[0]]), rule, evidence, narrow, part.get("counts", True))


def along(document: Document, table: str, label: str, axis: str) -> dict[float, float]:
    """Return accuracy by the value of an axis, where measured."""
    rows = [row for row in document.groups(table) if row.label == label and axis in row.axes]
    return {float(row.axes[axis]): row.accuracy for row in rows if row.accuracy is not None}


RULES: dict[str, Callable[[Document, Part], Finding]] = {
    "gain": gain_rule,
    "trend": trend_rule,
    "larger": larger_rule,
    "synergy": synergy_rule,
    "norms": norms_rule,
    "steadier": steadier_rule,
}
