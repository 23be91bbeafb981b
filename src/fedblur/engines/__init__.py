"""WHERE clients run. An engine maps the client code over a cohort and yields Bounded blocks; it decides nothing."""

from fedblur.engines.base import Engine
from fedblur.engines.local import LocalEngine, choose_engine, suitable_threads
from fedblur.engines.processes import Alone, Processes, Task

__all__ = ["Alone", "Engine", "LocalEngine", "Processes", "Task", "choose_engine", "suitable_threads"]
