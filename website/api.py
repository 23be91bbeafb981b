"""The reference of the public Python names: what `fedblur.__all__` says, by the module where each is at home."""

from __future__ import annotations

import fedblur


def reference() -> str:
    """Instructions for mkdocstrings, which reads signatures and docstrings."""
    homes: dict[str, list[str]] = {}
    for name in fedblur.__all__:
        homes.setdefault(fedblur._HOMES[name], []).append(name)
    return "\n".join(
        f"## From `fedblur.{module}`\n" + "".join(f"\n::: fedblur.{module}.{name}\n" for name in names)
        for module, names in sorted(homes.items())
    )
