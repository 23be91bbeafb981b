"""Metrics: what held-out data say of a model, one file per family. The contract is in `base.py`."""

from fedblur.core.registry import build
from fedblur.learning.metrics.base import Metric
from fedblur.learning.metrics.likelihoods import MeanLoss
from fedblur.learning.metrics.shares import Accuracy
from fedblur.learning.tasks.base import Task

__all__ = ["Accuracy", "Metric", "metrics_of"]


def metrics_of(task: Task, chosen: tuple[Metric, ...]) -> tuple[Metric, ...]:
    """Return the metrics of a run, the headline first: those that were chosen, or the task's own, or its loss."""
    found = chosen or tuple(build("metric", name) for name in task.metrics or ("loss",))
    return tuple(each.of(task) if isinstance(each, MeanLoss) else each for each in found)
