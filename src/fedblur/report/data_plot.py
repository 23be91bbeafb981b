"""A picture of a federation: how many samples clients have, and of which labels. Out: an image file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedblur.data.summary import Summary
from fedblur.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap

SUFFIXES = (".png", ".svg", ".pdf")
_CLIENTS_SHOWN = 40


def check_suffix(path: Path) -> None:
    """Before any work is done: the format follows from the file's name."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")


def draw_federation(summary: Summary, counts: NDArray[np.int64], path: Path) -> None:
    """Sizes as a histogram, and the label mix of some clients as stacked bars."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    check_suffix(path)
    figure = Figure(figsize=(11, 4.5), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    title = f"{summary.name}: {summary.train_clients:,} training clients"
    figure.suptitle(f"{title} ({summary.note})" if summary.note else title, fontsize=11)
    _draw_sizes(left, counts.sum(axis=1))
    _draw_labels(right, _spread(counts))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_sizes(axes: Axes, sizes: NDArray[np.int64]) -> None:
    low, high, median = int(sizes.min()), int(sizes.max()), float(np.median(sizes))
    if high - low <= 20:  # one bar per size
        axes.hist(sizes, bins=[edge - 0.5 for edge in range(low, high + 2)], rwidth=0.8)
        axes.set(xlim=(low - 2, high + 2), xticks=range(low, high + 1, 1 + (high - low) // 8))
    else:
        axes.hist(sizes, bins=30)
    axes.axvline(median, color="black", linestyle="--", linewidth=1)
    axes.set(title=f"Samples per client (median {median:g})", xlabel="samples")
    axes.set(ylabel=f"clients (of {len(sizes):,} looked at)")


def _draw_labels(axes: Axes, counts: NDArray[np.int64]) -> None:
    """One bar per client; clients with the same commonest class stand together."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    mixes = counts / counts.sum(axis=1, keepdims=True)
    mixes = mixes[np.lexsort((-mixes.max(axis=1), mixes.argmax(axis=1)))]
    classes = mixes.shape[1]
    colours = _colours(classes)
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


def _colours(classes: int) -> ListedColormap:
    """Distinct colours for few classes, a range of them for many."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    if classes <= 10:
        return ListedColormap([colormaps["tab10"](label) for label in range(classes)])
    return ListedColormap([colormaps["turbo"](share) for share in np.linspace(0.02, 0.98, classes)])


def _spread(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Some clients, evenly spaced among all."""
    shown = min(_CLIENTS_SHOWN, len(counts))
    some: NDArray[np.int64] = counts[np.linspace(0, len(counts) - 1, shown).astype(int)]
    return some
