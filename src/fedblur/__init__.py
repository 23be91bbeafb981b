"""FedBlur: federated learning with user-level differential privacy.

import fedblur

run = fedblur.train(fedblur.Config(dataset="digits", method="blur+lus", epsilon=2.0))
print(run.accuracy, run.epsilon)
"""

import importlib
import os
import sys
import types
import typing

if typing.TYPE_CHECKING:
    from fedblur.config import Config, LocalTraining
    from fedblur.data.federation import federation_from_arrays, load_federation
    from fedblur.data.population import Federation
    from fedblur.errors import FedBlurError
    from fedblur.methods import Method
    from fedblur.planning import Outlook, Setting, outlook
    from fedblur.registry import register
    from fedblur.report.statement import Statement, write_statement
    from fedblur.setup import Machine
    from fedblur.train import Run, resume, train

# A product of matrices must not round differently at another place in memory: one client would change the last bits of
# the clients behind it (docs/isolation.md). Intel's library reads this before its first product.
os.environ.setdefault("MKL_CBWR", "AUTO")

# Imported at their first use: a node of a federation starts a process for each message, and most need no torch.
_HOMES = {
    "Config": "config",
    "FedBlurError": "errors",
    "Federation": "data.population",
    "LocalTraining": "config",
    "Machine": "setup",
    "Method": "methods.base",
    "Outlook": "planning",
    "Run": "train",
    "Setting": "planning",
    "Statement": "report.statement",
    "federation_from_arrays": "data.federation",
    "load_federation": "data.federation",
    "outlook": "planning",
    "register": "registry",
    "resume": "train",
    "train": "train",
    "write_statement": "report.statement",
}

__all__ = [
    "Config",
    "FedBlurError",
    "Federation",
    "LocalTraining",
    "Machine",
    "Method",
    "Outlook",
    "Run",
    "Setting",
    "Statement",
    "federation_from_arrays",
    "load_federation",
    "outlook",
    "register",
    "resume",
    "train",
    "write_statement",
]


class _Package(types.ModuleType):
    """Importing the file `train.py` would put it where the function of that name belongs."""

    @property
    def train(self) -> object:
        return __getattr__("train")

    @train.setter
    def train(self, module: object) -> None:
        pass


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedblur' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedblur.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


sys.modules[__name__].__class__ = _Package
