"""The figures of one run. In: a record. Out: those figures that its rounds have numbers for."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from fedblur.report.figure import DRAWN, Figure, number, percent, table, thin
from fedblur.report.records import Record
from fedblur.report.svg import Axis, Series, axis_of, bar_chart, line_chart
from fedblur.report.svg import percent as whole

SHARE = Axis("", 0.0, 1.0, write=whole)
Drawer = Callable[[Record, str], Figure | None]


def run_figures(record: Record, key: str, public: bool) -> list[Figure]:
    """All that there is to draw; `public` leaves out what is local only."""
    drawers: tuple[Drawer, ...] = (norms, clipped, signal, classes, clients)
    return [] if public else [figure for draw in drawers if (figure := draw(record, key)) is not None]


def norms(record: Record, key: str) -> Figure | None:
    """The distribution of update norms before clipping, round by round, with the clip norm drawn in."""
    known = [(t, q) for t, q in record.local_only("norm_quantiles") if q[0] > 0]
    points, limit = thin(known, DRAWN), dict(record.local_only("clip_norm"))
    if not points:
        return None
    xs, quantiles = [t for t, _ in points], [q for _, q in points]
    bounds = [limit[t] for t in xs if t in limit]  # none without a clip norm
    columns = [[q[index] for q in quantiles] for index in range(5)]
    bands = [(columns[0], columns[4]), (columns[1], columns[3])]
    bounded = len(bounds) == len(xs)
    series = [Series("median", xs, columns[2], 0, bands), *([Series("S", xs, bounds, 1)] if bounded else [])]
    everything = [*columns[0], *columns[4], *bounds]
    y = axis_of("norm", everything, log=max(everything) > 8 * min(everything), zero=True)
    tips = [
        f"round {t}: median {number(q[2])}, half between {number(q[1])} and {number(q[3])}, S = {number(limit.get(t))}"
        for t, q in points
    ]
    words = (
        f"The median norm goes from {number(quantiles[0][2])} in round {xs[0]} to {number(quantiles[-1][2])} in round "
        f"{xs[-1]}; "
        + (
            f"the clip norm is {number(bounds[-1])}. What lies above is scaled down."
            if bounded
            else "nothing is clipped."
        )
    )
    return Figure(
        f"{key}-norms",
        "Update norms before clipping",
        words,
        line_chart(f"{key}-norms", series, axis_of("round", xs), y, tips=tips),
        ("round", "5 %", "25 %", "median", "75 %", "95 %", "clip norm"),
        table([str(t), *map(number, q), number(limit.get(t))] for t, q in points),
        (("line s0", "median"), ("band s0", "middle half, and 5 to 95 %"), *((("line s1", "clip norm S"),) * bounded)),
        local_only=True,
    )


def clipped(record: Record, key: str) -> Figure | None:
    """How many clients of each round lost a part of their update."""
    points = thin(record.local_only("clipped_share"), DRAWN)
    if not points:
        return None
    xs, ys = [float(t) for t, _ in points], [share for _, share in points]
    return Figure(
        f"{key}-clipped",
        "Share of clipped clients",
        f"From {percent(ys[0], 0)} of the cohort in round {xs[0]:.0f} to {percent(ys[-1], 0)} in round {xs[-1]:.0f}.",
        line_chart(
            f"{key}-clipped",
            [Series("clipped", xs, ys)],
            axis_of("round", xs),
            SHARE,
            tips=[f"round {t}: {percent(share)} clipped" for t, share in points],
        ),
        ("round", "clipped"),
        table([str(t), percent(share)] for t, share in points),
        local_only=True,
    )


def signal(record: Record, key: str) -> Figure | None:
    """The mean clipped update against the noise that is added to it, as norms."""
    limit, noise = dict(record.local_only("clip_norm")), dict(record.local_only("noise_norm"))
    found = [(t, kappa * limit[t], noise[t]) for t, kappa in record.local_only("kappa") if t in limit and t in noise]
    points = thin(found, DRAWN)
    if not points:
        return None
    xs, signals, noises = ([float(point[index]) for point in points] for index in range(3))
    noisy = any(noises)
    series = [Series("signal", xs, signals, 0), *([Series("noise", xs, noises, 1)] if noisy else [])]
    values = [value for value in (*signals, *noises) if value > 0] or [1.0]
    y = axis_of("norm", values, log=max(values) > 8 * min(values), zero=True)
    last = f"{signals[-1] / noises[-1]:.2g} times the noise" if noises[-1] else "without noise"
    tips = [f"round {t}: signal {number(a)}, noise {number(b)}" for t, a, b in points]
    return Figure(
        f"{key}-signal",
        "Signal and noise per round",
        f"The norm of the mean clipped update is {number(signals[-1])} in the last round, {last}; the noise averages "
        "out over rounds.",
        line_chart(f"{key}-signal", series, axis_of("round", xs), y, tips=tips),
        ("round", "signal", "noise"),
        table([str(t), number(a), number(b)] for t, a, b in points),
        (("line s0", "signal: mean clipped update"), *((("line s1", "noise on it (expected norm)"),) if noisy else ())),
        local_only=True,
    )


def classes(record: Record, key: str) -> Figure | None:
    """Accuracy on each class of the held-out data, at the end."""
    found = record.local_only("class_accuracy")
    if not found:
        return None
    shares: list[float | None] = found[-1][1]
    counts: list[int] = record.local_only("class_samples")[-1][1]
    known = [(share, label) for label, share in enumerate(shares) if share is not None]
    worst, best = min(known), max(known)
    names = [str(label) for label in range(len(shares))]
    tips = [f"class {label}: {percent(share)} of {n}" for label, (share, n) in enumerate(zip(shares, counts))]
    mean = statistics.mean(share for share, _ in known)
    return Figure(
        f"{key}-classes",
        "Accuracy by class",
        f"From {percent(worst[0])} (class {worst[1]}) to {percent(best[0])} (class {best[1]}), {percent(mean)} on "
        "average; held-out data, last round.",
        bar_chart(f"{key}-classes", shares, names, "class", SHARE, [mean], tips),
        ("class", "accuracy", "samples"),
        [[name, percent(share), str(n)] for name, share, n in zip(names, shares, counts)],
        (("rule", "mean"),),
        local_only=True,
    )


def clients(record: Record, key: str) -> Figure | None:
    """How training clients fare on their own data: a histogram."""
    found = record.local_only("client_accuracy")
    if not found:
        return None
    shares = sorted(found[-1][1])
    bins = [sum(1 for share in shares if min(9, int(10 * share)) == index) for index in range(10)]
    names = [f"{10 * index}–{10 * (index + 1)}" for index in range(10)]
    tenth = shares[: max(1, len(shares) // 10)]
    y = axis_of("clients", [0, *bins], zero=True)
    return Figure(
        f"{key}-clients",
        "Accuracy by client",
        f"{len(shares)} training clients on their own samples: median {percent(statistics.median(shares))}, the worst "
        f"tenth {percent(statistics.mean(tenth))} on average.",
        bar_chart(
            f"{key}-clients",
            bins,
            names,
            "accuracy on own samples, %",
            y,
            tips=[f"{name} %: {count} clients" for name, count in zip(names, bins)],
        ),
        ("accuracy, %", "clients"),
        [[name, str(count)] for name, count in zip(names, bins)],
        local_only=True,
    )
