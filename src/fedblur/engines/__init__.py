"""WHERE clients run. An engine maps the client code over a cohort and yields Bounded blocks; it decides nothing."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from fedblur.engines.choice import Choice, choose_engine
    from fedblur.engines.cohort_sum import CohortSum, Engine, Simulated, Task
    from fedblur.engines.local import LocalEngine, suitable_threads
    from fedblur.engines.workers import WorkerEngine

# Imported at their first use: the secure sum of `flower` needs no torch.
_HOMES = {
    "Choice": "choice",
    "CohortSum": "cohort_sum",
    "Engine": "cohort_sum",
    "LocalEngine": "local",
    "Simulated": "cohort_sum",
    "Task": "cohort_sum",
    "WorkerEngine": "workers",
    "choose_engine": "choice",
    "suitable_threads": "local",
}

__all__ = [
    "Choice",
    "CohortSum",
    "Engine",
    "LocalEngine",
    "Simulated",
    "Task",
    "WorkerEngine",
    "choose_engine",
    "suitable_threads",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedblur.engines' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedblur.engines.{_HOMES[name]}"), name)
