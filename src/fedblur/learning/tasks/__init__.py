"""Tasks: what a model's outputs mean, one file each. The contract is in `base.py`."""

from fedblur.learning.tasks.base import Task
from fedblur.learning.tasks.classification import Classification
from fedblur.learning.tasks.own import Loss, Own, OwnLoss

__all__ = ["Classification", "Loss", "Own", "OwnLoss", "Task"]
