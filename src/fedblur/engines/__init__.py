"""WHERE clients run. An engine maps the client code over a cohort and yields Bounded blocks; it decides nothing."""

from fedblur.engines.base import Engine
from fedblur.engines.choice import Choice, choose_engine
from fedblur.engines.local import LocalEngine, suitable_threads
from fedblur.engines.processes import Alone, Processes, Task
from fedblur.engines.workers import WorkerEngine

__all__ = [
    "Alone",
    "Choice",
    "Engine",
    "LocalEngine",
    "Processes",
    "Task",
    "WorkerEngine",
    "choose_engine",
    "suitable_threads",
]
