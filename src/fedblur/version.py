"""The version, also where the package runs from a source tree that nobody installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


def version() -> str:
    """As pip knows it."""
    try:
        return installed("fedblur")
    except PackageNotFoundError:
        return "source tree"
