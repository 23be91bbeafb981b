"""Figures as files: a plan, a federation, an audit. Drawn by matplotlib, which is imported only where one is drawn."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedblur.core.errors import ConfigError, PrivacyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedblur.data.summary import Summary
    from fedblur.experiments.audit import Attack, Audit
    from fedblur.privacy.accounting import Accountant
    from fedblur.privacy.planning import Outlook, Setting
    from fedblur.training.noise_comparison import Comparison

SUFFIXES = (".png", ".svg", ".pdf")
BLUE, RED = "#1b6ca8", "#c8553d"
BANDS = (  # of the signal-to-noise ratio R
    (0.0, 1.0, "more noise than signal"),
    (1.0, 2.0, "weak"),
    (2.0, 5.0, "learnable"),
    (5.0, math.inf, "comfortable"),
)
_CLIENTS_SHOWN = 40
_LINES = (  # colour and style: dashed where secret coins are assumed
    ("grey", "--"), ("black", "-"), ("#3c8d5a", "-"), (BLUE, "-"), (RED, "-"), (BLUE, "--"),
)  # fmt: skip


def check_suffix(path: Path) -> None:
    """Refuse a file name that names no format, before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")


def plot_outlook(outlook: Outlook, path: Path) -> None:
    """Draw ε as rounds go by, and R as more clients take part."""
    from fedblur.privacy.planning import comparable

    check_suffix(path)
    if not comparable(outlook.tightest):
        raise ConfigError(f"epsilon={outlook.tightest.epsilon_target:g} leaves nothing to plot; leave --plot out")
    figure = _figure(10.5, 4.2)
    left, right = figure.subplots(1, 2)
    # One mechanism, the tightest plan's, under both accountants: the gap is what the looser one overstates.
    plan = outlook.tightest
    rounds = np.unique(np.geomspace(1, plan.rounds, 25).round().astype(int))
    for name, colour in _colours(outlook):
        spent = [replace(plan, accountant=name).epsilon(int(t)) for t in rounds]
        left.plot([0, *rounds], [0.0, *spent], color=colour, label=name.upper())
    left.axhline(plan.epsilon_target, color="grey", linestyle=":", linewidth=1, label=f"ε = {plan.epsilon_target:.3g}")
    left.set(xlabel="rounds", ylabel="ε spent", xlim=(0, plan.rounds), ylim=(0, None))
    left.set_title(f"ε over rounds, σ = {plan.noise_multiplier:.3g}, δ = {plan.delta:.2g}")
    left.legend(loc="lower right")
    _draw_ratio(right, outlook)
    _save(figure, path)


def _draw_ratio(axes: Axes, outlook: Outlook) -> None:
    from fedblur.privacy.planning import at_epsilon, plan_of, signal_to_noise

    setting, target = outlook.setting, outlook.tightest.epsilon_target
    rates = sample_rates(setting)
    highest = 0.0
    for name, colour in _colours(outlook):
        ratios = []
        for rate in rates:
            try:
                plan = plan_of(replace(at_epsilon(setting, outlook.tightest), sample_rate=rate), name)
                ratios.append(signal_to_noise(plan, setting.parameters))
            except PrivacyError:  # a target out of reach at this rate: a gap in the line
                ratios.append(math.nan)
        axes.plot(rates, ratios, color=colour, marker="o", markersize=3, label=name.upper())
        highest = max(highest, np.nanmax(ratios))
    top = 1.15 * highest
    for low, high, words in (band for band in BANDS if band[0] < top):
        middle, shade = (low + min(high, top)) / 2, 0.12 if low in (0.0, 2.0) else 0.0
        axes.axhspan(low, min(high, top), color="grey", alpha=shade, linewidth=0)
        if min(high, top) - low > 0.05 * top:
            axes.text(0.02, middle, words, transform=axes.get_yaxis_transform(), va="center", color="#555")
    axes.axvline(setting.sample_rate, color="grey", linestyle=":", linewidth=1, label=f"p = {setting.sample_rate:g}")
    axes.set(xscale="log", xlabel="sample rate p", ylabel="signal-to-noise R", ylim=(0, top))
    axes.set_title(f"R at ε = {target:.3g}, T = {setting.rounds:,}, d = {setting.parameters:,}")
    axes.legend(loc="lower right")


def plot_noise(comparison: Comparison, path: Path) -> None:
    """Draw the noise in the model as rounds go by, a line for each kind of noise."""
    check_suffix(path)
    question = comparison.question
    rounds = np.unique(np.geomspace(1, question.rounds, 60).round().astype(int)).tolist()
    figure = _figure(7.5, 4.4)
    axes = figure.subplots()
    for choice, (colour, style) in zip(comparison.choices, _LINES, strict=False):
        noise = comparison.over_rounds(choice.name, rounds)
        axes.plot(rounds, noise, color=colour, linestyle=style, label=choice.name)
    axes.set(xscale="log", yscale="log", xlabel="rounds", ylabel="noise in the model: std of each coordinate")
    axes.set_title(f"ε = {question.epsilon:g}, a client's rounds at least {question.separation} apart")
    axes.legend(fontsize=8)
    _save(figure, path)


def sample_rates(setting: Setting) -> list[float]:
    """Return rates around the planned one and up to everyone, but with one client a round at least."""
    if setting.sampling == "full":
        return [1.0]
    smallest = max(1 / setting.clients, min(setting.sample_rate / 10, 0.1))
    return sorted({setting.sample_rate, *np.geomspace(smallest, 1, 9).tolist()})


def draw_federation(summary: Summary, counts: NDArray[np.int64], path: Path) -> None:
    """Draw sizes of clients as a histogram, and the label mix of some of them as stacked bars."""
    check_suffix(path)
    figure = _figure(11, 4.5)
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    title = f"{summary.name}: {summary.train_clients:,} training clients"
    figure.suptitle(f"{title} ({summary.note})" if summary.note else title, fontsize=11)
    sizes = counts.sum(axis=1)
    low, high, median = int(sizes.min()), int(sizes.max()), float(np.median(sizes))
    if high - low <= 20:  # one bar per size
        left.hist(sizes, bins=[edge - 0.5 for edge in range(low, high + 2)], rwidth=0.8)
        left.set(xlim=(low - 2, high + 2), xticks=range(low, high + 1, 1 + (high - low) // 8))
    else:
        left.hist(sizes, bins=30)
    left.axvline(median, color="black", linestyle="--", linewidth=1)
    left.set(title=f"Samples per client (median {median:g})", xlabel="samples")
    left.set(ylabel=f"clients (of {len(sizes):,} looked at)")
    shown = np.linspace(0, len(counts) - 1, min(_CLIENTS_SHOWN, len(counts))).astype(int)
    _draw_labels(right, counts[shown])
    _save(figure, path)


def _draw_labels(axes: Axes, counts: NDArray[np.int64]) -> None:
    """Draw one bar per client; clients with the same commonest class stand together."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    mixes = counts / counts.sum(axis=1, keepdims=True)
    mixes = mixes[np.lexsort((-mixes.max(axis=1), mixes.argmax(axis=1)))]
    classes = mixes.shape[1]
    if classes <= 10:  # distinct colours for few classes, a range of them for many
        colours = ListedColormap([colormaps["tab10"](label) for label in range(classes)])
    else:
        colours = ListedColormap([colormaps["turbo"](share) for share in np.linspace(0.02, 0.98, classes)])
    below = np.zeros(len(mixes))
    for label in range(classes):
        axes.bar(np.arange(len(mixes)), mixes[:, label], 0.9, bottom=below, color=colours(label))
        below += mixes[:, label]
    axes.set(title=f"Label mix of {len(mixes)} clients", xlabel="client (grouped by commonest class)")
    axes.set(ylabel="share of its samples", ylim=(0, 1), xlim=(-0.6, len(mixes) - 0.4), xticks=[])
    norm = BoundaryNorm([edge - 0.5 for edge in range(classes + 1)], classes)
    ticks = range(0, classes, 1 if classes <= 20 else 10)
    bar = axes.figure.colorbar(ScalarMappable(norm, colours), ax=axes, label="class", ticks=list(ticks))
    bar.minorticks_off()


def plot_audit(audit: Audit, path: Path) -> None:
    """Draw cosines of seen and unseen canaries against the null, one panel for each adversary."""
    figure = _figure(10.5, 4.0)
    for axes, attack in zip(figure.subplots(1, len(audit.attacks)), audit.attacks, strict=True):
        _draw_attack(axes, attack)
    noise = ", NOISE REMOVED" if audit.noise_removed else ""
    figure.suptitle(f"Claimed ε = {audit.claimed:.3g}{noise}: attacks are {audit.verdict} it", fontsize=11)
    _save(figure, path)


def _draw_attack(axes: Axes, attack: Attack) -> None:
    from scipy.stats import norm

    both = np.concatenate([attack.seen, attack.unseen])
    bins = np.linspace(both.min(), both.max(), 60).tolist()
    axes.hist(attack.unseen, bins, density=True, color=BLUE, alpha=0.45, label=f"unseen ({len(attack.unseen):,})")
    axes.hist(attack.seen, bins, density=True, color=RED, alpha=0.45, label=f"canaries ({len(attack.seen):,})")
    grid = np.linspace(bins[0], bins[-1], 300)
    if attack.null_std is not None:
        which, null = "", norm(0.0, attack.null_std)
        axes.plot(grid, null.pdf(grid), color="black", linewidth=1, label="null")
    else:
        which, null = "largest ", norm(attack.unseen.mean(), attack.unseen.std(ddof=1))
        axes.plot(grid, null.pdf(grid), color="black", linewidth=1, label="null, fitted")
    fit = norm.pdf(grid, attack.seen.mean(), attack.seen.std(ddof=1))
    axes.plot(grid, fit, color=RED, linewidth=1, linestyle="--", label="canaries, fitted")
    found = attack.estimate
    axes.set(xlabel=f"{which}cosine with the canary's direction", ylabel="density")
    axes.set_title(f"{attack.name}: ε = {found.epsilon:.2f} [{found.low:.2f}, {found.high:.2f}]", fontsize=10)
    axes.legend(fontsize=8)


def _colours(outlook: Outlook) -> list[tuple[Accountant, str]]:
    from fedblur.privacy.accounting import ACCOUNTANTS

    colours: dict[Accountant, str] = {"pld": BLUE, "rdp": RED}
    return [(name, colours[name]) for name in ACCOUNTANTS if name in outlook.plans]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def picture(figure: Figure, form: str, metadata: dict[str, str | None]) -> bytes:
    """Return a figure as the content of a file: "pdf", "svg" or "png"."""
    content = io.BytesIO()
    figure.savefig(content, format=form, metadata=metadata)
    return content.getvalue()
