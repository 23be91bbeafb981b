"""The version, also where the package runs from a source tree that nobody installed."""

from __future__ import annotations


def version() -> str:
    """Return the version as pip knows it."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import: only when asked

    try:
        return version("fedblur")
    except PackageNotFoundError:
        return "source tree"
