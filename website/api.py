"""The reference of the public Python names: what `fedblur.__all__` says, by the module where each is at home."""

from __future__ import annotations

import dataclasses
import inspect

import fedblur
from website import settings


def reference() -> str:
    """Return a table of all names, then instructions for mkdocstrings, which reads signatures and docstrings."""
    homes: dict[str, list[str]] = {}
    for name in fedblur.__all__:
        homes.setdefault(fedblur._HOMES[name], []).append(name)
    rows = [f"| [`{name}`][{fedblur._HOMES[name]}.{name}] | {first_line(name)} |" for name in fedblur.__all__]
    sections = (
        f"## From `{module}`\n" + "".join(f"\n::: {module}.{name}\n\n{fields(name)}\n" for name in names)
        for module, names in sorted(homes.items())
    )
    return "\n".join(["| name | what it is |", "|---|---|", *rows, "", *sections])


def first_line(name: str) -> str:
    """Return the first sentence of a public name's docstring."""
    text = inspect.getdoc(getattr(fedblur, name)) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].removesuffix(".") + "."


def fields(name: str) -> str:
    """Return a table of a dataclass's fields; mkdocstrings shows only those that have a docstring."""
    found = getattr(fedblur, name)
    return settings.table(found) if dataclasses.is_dataclass(found) else ""
