"""Metrics as people see them: the name in words, the unit, and which direction is better."""

from __future__ import annotations

from dataclasses import dataclass

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
        return _WORDS.get(self.name, self.name.replace("_", " "))

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
_KNOWN = {measure.name: measure for measure in (ACCURACY, LOSS)}


def measure_of(name: str) -> Measure:
    """Return how a metric is shown."""
    return _KNOWN.get(name) or Measure(name)
