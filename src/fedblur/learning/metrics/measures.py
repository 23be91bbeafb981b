"""Metrics as people see them: the name in words, the unit, and which direction is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedblur.core.errors import ConfigError
from fedblur.core.registry import build, parts

_WORDS = {
    "auroc": "AUROC",
    "f1": "F1",
    "mae": "MAE",
    "ndcg": "NDCG",
    "rmse": "RMSE",
}


@dataclass(frozen=True)
class Measure:
    """A figure of a model on held-out data. A share is kept as it is and shown in percent."""

    name: str  # its key in rows, summaries and results
    percent: bool = False
    larger_is_better: bool = True

    @property
    def words(self) -> str:
        """The name in a sentence: `accuracy`, `RMSE`."""
        if self.name.startswith("top_"):
            return f"top-{self.name.removeprefix('top_')} accuracy"
        name, at, k = self.name.partition("@")
        return _WORDS.get(name, name.replace("_", " ")) + f"{at}{k}"

    @property
    def capital(self) -> str:
        """The name at the beginning of a sentence."""
        return self.words[:1].upper() + self.words[1:]

    @property
    def title(self) -> str:
        """The name with its unit, for a column or an axis: `accuracy (%)`, `RMSE`."""
        return f"{self.words} (%)" if self.percent else self.words

    @property
    def unit(self) -> str:
        """The unit of a difference."""
        return "percentage points" if self.percent else "units of the metric"

    @property
    def best(self) -> str:
        """The end of the axis that is better."""
        return "Highest" if self.larger_is_better else "Lowest"

    @property
    def digits(self) -> int:
        """Digits after the point that are shown."""
        return 2 if self.percent else 3

    def scaled(self, value: float) -> float:
        """Return a value in the unit in which it is shown."""
        return 100 * value if self.percent else value

    def shown(self, value: float | None, digits: int | None = None) -> str:
        """Return a value as text, with the percent sign of a share."""
        if value is None:
            return "–"
        return f"{self.scaled(value):.{self.digits if digits is None else digits}f}{' %' if self.percent else ''}"

    def better(self, one: float, other: float) -> bool:
        """Return whether the first value is better than the second."""
        return one > other if self.larger_is_better else one < other


ACCURACY = Measure("accuracy", percent=True)
LOSS = Measure("loss", larger_is_better=False)


def measure_of(name: str) -> Measure:
    """Return how a metric is shown, by its key in results ("ndcg@10").

    One that is not registered here (a plugin's, or what `on_evaluate` found) is a number, larger is better.
    """
    if name == LOSS.name:
        return LOSS
    metric: Any = parts("metric").get(name) or parts("metric").get(name.partition("@")[0])
    return Measure(name) if metric is None else Measure(name, metric.percent, metric.larger_is_better)


def ordered(figures: Mapping[str, float], config: Mapping[str, Any]) -> dict[str, float]:
    """Return a run's metrics, the headline first, by its configuration: JSON with sorted keys loses their order."""
    names = [_key(metric) for metric in config.get("metrics") or ()]
    if not names:
        task: Any = parts("task").get((config.get("task") or {"name": "classification"})["name"])
        names = [] if task is None else [_key(name) for name in task.metrics]
    first = {name: figures[name] for name in names if name in figures}
    return first | {name: value for name, value in figures.items() if name not in first}


def _key(metric: Any) -> str:
    """Return the name of a metric's figure; a plugin that is not loaded here is known by its name alone."""
    try:
        return str(build("metric", metric).key)
    except ConfigError:
        return str(metric if isinstance(metric, str) else metric["name"])
