"""The switch for accel/: `FEDBLUR_ACCEL=off` computes everything with plain torch, one step after another."""

from __future__ import annotations

import os


def accelerated() -> bool:
    """Return whether accel/ may be used. Whoever uses it asks first, and imports it afterwards."""
    return os.environ.get("FEDBLUR_ACCEL") != "off"
