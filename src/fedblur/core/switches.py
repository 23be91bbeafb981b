"""The switches of what makes FedBlur fast, in the environment: each is on unless its variable says `off`.

FEDBLUR_ACCEL          all of accel/: without it everything is computed with plain torch, one step after another
FEDBLUR_TIMING         a short timing that chooses the engine; without it a rule does
FEDBLUR_NATIVE         kernels in C, on a CPU
FEDBLUR_CUDA_GRAPHS    recordings of local training, on a GPU
"""

from __future__ import annotations

import os

from fedblur.core.errors import ConfigError

SWITCHES = ("FEDBLUR_ACCEL", "FEDBLUR_TIMING", "FEDBLUR_NATIVE", "FEDBLUR_CUDA_GRAPHS")


def switched_on(name: str) -> bool:
    """Return whether a switch is on; any other value than on and off is refused by name."""
    value = os.environ.get(name) or "on"
    if value not in ("on", "off"):
        raise ConfigError(f"{name}={value!r} must be on or off (on where it is not set)")
    return value == "on"


def accelerated() -> bool:
    """Return whether accel/ may be used. Whoever uses it asks first, and imports it afterwards."""
    return switched_on("FEDBLUR_ACCEL")
