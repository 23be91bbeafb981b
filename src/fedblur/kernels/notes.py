"""How a tensor came about, noted on the tensor itself: a layer behind it can do better with that knowledge."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

_NOTE = "_fedblur_origin"
Origin = TypeVar("Origin")


def note(tensor: Tensor, origin: object) -> Tensor:
    setattr(tensor, _NOTE, (origin, tensor._version))
    return tensor


def origin_of(tensor: Tensor, kind: type[Origin]) -> Origin | None:
    """What made this tensor, if that is of this kind; nothing once the tensor was changed in place."""
    origin, version = getattr(tensor, _NOTE, (None, -1))
    return origin if isinstance(origin, kind) and tensor._version == version else None
