"""FedBlur: federated learning with user-level differential privacy.

import fedblur

run = fedblur.train(fedblur.Config(dataset="digits", method="blur+lus", epsilon=2.0))
print(run.accuracy, run.epsilon)
"""

import importlib
import os
import typing

from fedblur.core import callbacks, old_names, registry

if typing.TYPE_CHECKING:
    from fedblur.core.config import Config, LocalTraining
    from fedblur.core.errors import FedBlurError
    from fedblur.core.registry import register
    from fedblur.data.federation import federation_from_arrays, load_federation
    from fedblur.data.population import Federation
    from fedblur.data.table import federation_from_table
    from fedblur.learning.methods.base import Method
    from fedblur.learning.metrics.base import Metric, metric
    from fedblur.learning.tasks.base import Task
    from fedblur.privacy.planning import Outlook, Setting, outlook
    from fedblur.report.load import load
    from fedblur.report.statement import Statement, write_statement
    from fedblur.training.loop import Run, train
    from fedblur.training.machine import Machine
    from fedblur.training.resume import resume

# A product of matrices must not round differently at another place in memory: one client would change the last bits of
# the clients behind it (docs/isolation.md). Intel's library reads this before its first product.
os.environ.setdefault("MKL_CBWR", "AUTO")

old_names.install()

# Where each public name is defined. It is imported at its first use: `fedblur --version` needs no torch.
_HOMES = {
    "Config": "fedblur.core.config",
    "FedBlurError": "fedblur.core.errors",
    "Federation": "fedblur.data.population",
    "LocalTraining": "fedblur.core.config",
    "Machine": "fedblur.training.machine",
    "Method": "fedblur.learning.methods.base",
    "Metric": "fedblur.learning.metrics.base",
    "Outlook": "fedblur.privacy.planning",
    "Run": "fedblur.training.loop",
    "Setting": "fedblur.privacy.planning",
    "Statement": "fedblur.report.statement",
    "Task": "fedblur.learning.tasks.base",
    "federation_from_arrays": "fedblur.data.federation",
    "federation_from_table": "fedblur.data.table",
    "load": "fedblur.report.load",
    "load_federation": "fedblur.data.federation",
    "metric": "fedblur.learning.metrics.base",
    "outlook": "fedblur.privacy.planning",
    "register": "fedblur.core.registry",
    "resume": "fedblur.training.resume",
    "train": "fedblur.training.loop",
    "write_statement": "fedblur.report.statement",
}

# Where the parts of each kind register themselves; the registry reads it.
registry.PART_HOMES.update(
    dataset="fedblur.data",
    partition="fedblur.data",
    model="fedblur.learning.models",
    method="fedblur.learning.methods",
    mechanism="fedblur.privacy.mechanisms",
    sampling="fedblur.privacy.sampling fedblur.privacy.participation",
    server="fedblur.training.server",
    averaging="fedblur.training.server",
    clipping="fedblur.training.adaptive_clipping",
    mask="fedblur.training.public_mask",
    voting="fedblur.voting.ae_dpfl fedblur.voting.knn_dpfl",  # alone: the rest of the room runs them
    denoise="fedblur.training.denoise",
    task="fedblur.learning.tasks",
    metric="fedblur.learning.metrics",
)

# Every run that ends gets its privacy statement: from Python, by votes, on Flower and on the command line.
callbacks.RUN_ENDED.append(lambda run: importlib.import_module("fedblur.report.statement").write_statement(run))

__all__ = [
    "Config",
    "FedBlurError",
    "Federation",
    "LocalTraining",
    "Machine",
    "Method",
    "Metric",
    "Outlook",
    "Run",
    "Setting",
    "Statement",
    "Task",
    "federation_from_arrays",
    "federation_from_table",
    "load",
    "load_federation",
    "metric",
    "outlook",
    "register",
    "resume",
    "train",
    "write_statement",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedblur' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
