"""The figure of an audit: cosines of seen and unseen canaries against the null, one panel for each adversary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import norm

from fedblur.audit import Attack, Audit

SEEN, UNSEEN = "#c8553d", "#1b6ca8"


def plot_audit(audit: Audit, path: Path) -> None:
    """Write the figure; the file's ending decides the format."""
    figure = Figure(figsize=(10.5, 4.0), layout="constrained")
    for axes, attack in zip(figure.subplots(1, len(audit.attacks)), audit.attacks, strict=True):
        _panel(axes, attack)
    noise = ", NOISE REMOVED" if audit.noise_removed else ""
    figure.suptitle(f"Claimed ε = {audit.claimed:.3g}{noise}: attacks are {audit.verdict} it", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, attack: Attack) -> None:
    both = np.concatenate([attack.seen, attack.unseen])
    bins = np.linspace(both.min(), both.max(), 60).tolist()
    axes.hist(attack.unseen, bins, density=True, color=UNSEEN, alpha=0.45, label=f"unseen ({len(attack.unseen):,})")
    axes.hist(attack.seen, bins, density=True, color=SEEN, alpha=0.45, label=f"canaries ({len(attack.seen):,})")
    known = attack.null_std is not None
    centre = 0.0 if known else float(attack.unseen.mean())
    scale = attack.null_std if attack.null_std is not None else float(attack.unseen.std(ddof=1))
    grid = np.linspace(bins[0], bins[-1], 300)
    axes.plot(
        grid, norm.pdf(grid, centre, scale), color="black", linewidth=1, label="null" if known else "null, fitted"
    )
    fit = norm.pdf(grid, attack.seen.mean(), attack.seen.std(ddof=1))
    axes.plot(grid, fit, color=SEEN, linewidth=1, linestyle="--", label="canaries, fitted")
    found = attack.estimate
    axes.set(xlabel=f"{'' if known else 'largest '}cosine with the canary's direction", ylabel="density")
    axes.set_title(f"{attack.name}: ε = {found.epsilon:.2f} [{found.low:.2f}, {found.high:.2f}]", fontsize=10)
    axes.legend(fontsize=8)
