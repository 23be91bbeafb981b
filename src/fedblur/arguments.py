"""The edge of the Python interface: what does not belong where it was passed is said in one line, with the way out."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedblur.config import Config
from fedblur.data.population import Federation
from fedblur.errors import ConfigError
from fedblur.setup import Machine

_WANTED = {
    "config": (Config, 'a fedblur.Config, like fedblur.Config(dataset="digits", epsilon=2.0)'),
    "machine": (Machine, 'a fedblur.Machine, like fedblur.Machine(device="cpu")'),
    "federation": (Federation, "what fedblur.federation_from_arrays or fedblur.load_federation gives"),
    "module": (nn.Module, "an nn.Module (an instance, not its class)"),
}


def check_arguments(config: Any, machine: Any, federation: Any, module: Any) -> None:
    """Of `train` and `resume`; None is left to their defaults."""
    given = {"config": config, "machine": machine, "federation": federation, "module": module}
    for name, value in given.items():
        kind, words = _WANTED[name]
        if value is not None and not isinstance(value, kind):
            what = value.__name__ if isinstance(value, type) else type(value).__name__
            raise ConfigError(f"{name}={what} must be {words}")
    if config is not None and federation is not None and config.clients not in (None, federation.train.clients):
        raise ConfigError(
            f"clients={config.clients} has no effect on data of your own, which have {federation.train.clients} "
            "training clients: leave it out, or take fewer where you make them"
        )
