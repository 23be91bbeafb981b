"""Tasks: what a model's outputs mean, one file each. The contract is in `base.py`."""

from fedblur.learning.tasks.base import Task
from fedblur.learning.tasks.classification import Classification

__all__ = ["Classification", "Task"]
