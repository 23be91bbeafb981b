"""Modules that are slow to import, loaded at the first use of a name in them: `from fedblur.core.lazy import torch`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any


class Lazy:
    """Stands for a module until a name in it is used. Names that are given here are used instead of the module's."""

    __spec__ = None  # the import system asks for it, of a module

    def __init__(self, module: str, **instead: Any) -> None:
        self._module = module
        self.__dict__.update(instead)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(importlib.import_module(self._module), name)
        setattr(self, name, value)  # the next use is as quick as in the module itself
        return value


@contextmanager
def standing_in(modules: dict[str, Lazy]) -> Iterator[None]:
    """Let imports inside the block find these stand-ins, where the modules have not been imported before."""
    new = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(new)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in new:
            del sys.modules[name]


if TYPE_CHECKING:
    import torch as torch
else:
    torch = Lazy("torch")
