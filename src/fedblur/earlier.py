"""Configurations of earlier versions: read as they were meant, hashed as they were, so that results keep their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedblur.errors import ConfigError

# Keys that came after results were first kept: at these values they leave the hash of a configuration as it was.
_LATER: dict[str, Any] = {"denoise": None, "test_views": 1}
_GAUSSIAN = {"name": "gaussian", "placement": "server"}  # as version 0.1 wrote it


def read(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without what version 0.1 said about where noise is added: only the server adds it now."""
    mechanism = table.get("mechanism")
    if not isinstance(mechanism, Mapping) or "placement" not in mechanism:
        return dict(table)
    if mechanism["placement"] != "server":
        raise ConfigError(
            f"mechanism.placement={mechanism['placement']!r}: shares of rounded Gaussian noise do not add up to it; "
            'use mechanism = { name = "ddgauss", mode = "exact" }, or drop placement'
        )
    return {**table, "mechanism": {key: value for key, value in mechanism.items() if key != "placement"}}


def hashed(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration's hash is made of."""
    kept = {key: value for key, value in table.items() if key not in _LATER or value != _LATER[key]}
    return kept | {"mechanism": _GAUSSIAN} if kept["mechanism"] == {"name": "gaussian"} else kept
