"""The figure of `fedblur plan --plot`: epsilon as rounds go by, and R as more clients take part."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedblur.accounting import Accountant, PrivacyPlan
from fedblur.errors import ConfigError, PrivacyError
from fedblur.planning import ACCOUNTANTS, Outlook, Setting, at_epsilon, comparable, plan_of, signal_to_noise

COLOURS: dict[Accountant, str] = {"pld": "#1b6ca8", "rdp": "#c8553d"}
BANDS = (
    (0.0, 1.0, "more noise than signal"),
    (1.0, 2.0, "weak"),
    (2.0, 5.0, "learnable"),
    (5.0, math.inf, "comfortable"),
)


def plot_outlook(outlook: Outlook, path: Path) -> None:
    """Write the figure; the file's ending decides the format."""
    if not comparable(outlook.tightest):
        raise ConfigError(f"epsilon={outlook.tightest.epsilon_target:g} leaves nothing to plot; leave --plot out")
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _epsilon_over_rounds(left, outlook)
    _ratio_over_rates(right, outlook)
    try:
        figure.savefig(path, dpi=150)
    except ValueError:
        raise ConfigError(f"--plot {path} must end in .png, .svg or .pdf") from None


def _epsilon_over_rounds(axes: Axes, outlook: Outlook) -> None:
    # One mechanism, the tightest plan's, under both accountants: the gap is what the looser one overstates.
    plan = outlook.tightest
    rounds = np.unique(np.geomspace(1, plan.rounds, 25).round().astype(int))
    for name in (name for name in ACCOUNTANTS if name in outlook.plans):
        spent = [replace(plan, accountant=name).epsilon(int(t)) for t in rounds]
        axes.plot([0, *rounds], [0.0, *spent], color=COLOURS[name], label=name.upper())
    axes.axhline(plan.epsilon_target, color="grey", linestyle=":", linewidth=1, label=f"ε = {plan.epsilon_target:.3g}")
    axes.set(xlabel="rounds", ylabel="ε spent", xlim=(0, plan.rounds), ylim=(0, None))
    axes.set_title(f"ε over rounds, σ = {plan.noise_multiplier:.3g}, δ = {plan.delta:.2g}")
    axes.legend(loc="lower right")


def _ratio_over_rates(axes: Axes, outlook: Outlook) -> None:
    setting, target = outlook.setting, outlook.tightest.epsilon_target
    rates = sample_rates(setting)
    highest = 0.0
    for name in (name for name in ACCOUNTANTS if name in outlook.plans):
        ratios = [_ratio(replace(at_epsilon(setting, outlook.tightest), sample_rate=p), name) for p in rates]
        axes.plot(rates, ratios, color=COLOURS[name], marker="o", markersize=3, label=name.upper())
        highest = max(highest, np.nanmax(ratios))
    axes.axvline(setting.sample_rate, color="grey", linestyle=":", linewidth=1, label=f"p = {setting.sample_rate:g}")
    _shade(axes, 1.15 * highest)
    axes.set(xscale="log", xlabel="sample rate p", ylabel="signal-to-noise R", ylim=(0, 1.15 * highest))
    axes.set_title(f"R at ε = {target:.3g}, T = {setting.rounds:,}, d = {setting.parameters:,}")
    axes.legend(loc="lower right")


def sample_rates(setting: Setting) -> list[float]:
    """Around the planned one and up to everyone, but with one client a round at least."""
    if setting.sampling == "full":
        return [1.0]
    smallest = max(1 / setting.clients, min(setting.sample_rate / 10, 0.1))
    return sorted({setting.sample_rate, *np.geomspace(smallest, 1, 9).tolist()})


def _ratio(setting: Setting, accountant: Accountant) -> float:
    try:
        plan: PrivacyPlan = plan_of(setting, accountant)
    except PrivacyError:  # a target out of reach at this rate: a gap in the line
        return math.nan
    return signal_to_noise(plan, setting.parameters)


def _shade(axes: Axes, top: float) -> None:
    for index, (low, high, name) in enumerate(BANDS):
        if low >= top:
            return
        shown = min(high, top)
        axes.axhspan(low, shown, color="grey", alpha=0.12 if index % 2 == 0 else 0.0, linewidth=0)
        if shown - low > 0.05 * top:
            axes.text(0.02, (low + shown) / 2, name, transform=axes.get_yaxis_transform(), va="center", color="#555")
