"""The presets of `recipe = "best"`: settings for kinds of data, and the constants of its rule (`recipe.py`).

All of its numbers are in this file. Where they come from is in docs/recipe.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedblur.core.registry import build


@dataclass(frozen=True)
class Family:
    """Settings that suit one kind of data."""

    what: str
    models: tuple[dict[str, Any], ...]  # the largest first
    method: tuple[dict[str, Any], ...]
    server_rate: float  # η_g at S = CLIP_NORM, T = rounds and R of at least full_signal
    rounds: int  # T, where the work allows
    views: str = "views of a client's own samples cost no privacy"  # why these methods
    training: str = "few local steps keep clients' updates alike"  # why these steps
    enough_signal: float = 8.0  # R: the largest model that has it is taken
    full_signal: float = 8.0  # R; below it the server steps shorter
    local_rate: float = 0.1  # η_l
    local_steps: int = 3  # Q
    batch_size: int = 32
    schedule: str = "cosine"
    momentum: float = 0.9  # of the server


CHARACTERS = Family(
    "grey images",
    models=tuple({"name": "glyphs", "features": features} for features in (256, 128)),
    method=(),
    server_rate=4.0,
    rounds=500,
    views="features are fixed, so each sample is looked at once",
    enough_signal=12.0,
    full_signal=35.0,
    local_rate=1.0,
    local_steps=1,
    batch_size=256,
    schedule="linear",
)
PHOTOGRAPHS = replace(
    CHARACTERS,
    what="colour images",
    models=tuple({"name": "leaves", "channels": channels} for channels in (256, 128, 64)),
    enough_signal=8.0,
    full_signal=60.0,
)
FIXED = {"glyphs": CHARACTERS, "leaves": PHOTOGRAPHS}  # by the model that begins with fixed features
GREY_NETWORKS = Family(  # where the user gives another model for grey images
    "grey images, a network of your own",
    models=({"name": "gn_resnet"},),
    method=({"name": "augment", "shift": 0.07, "rotation": 10.0, "scale": 0.1, "shear": 0.1, "warp": 0.02},),
    server_rate=4.0,
    rounds=1000,
    full_signal=20.0,
)
COLOUR_NETWORKS = Family(
    "colour images, a network of your own",
    models=({"name": "gn_resnet", "stem": 24, "widths": [32, 64], "kernel": 3},),
    method=({"name": "augment", "shift": 0.1, "flip": True},),
    server_rate=1.5,
    rounds=1000,
)
FEATURES = Family(
    "plain features",
    models=({"name": "mlp", "hidden": [64]}, {"name": "mlp", "hidden": [32]}, {"name": "logistic"}),
    method=(),
    server_rate=1.0,
    rounds=300,
    views="views are for images; DP-FedAvg otherwise",
)
TEXT = Family(
    "text",
    models=tuple({"name": "char_mlp", "hidden": hidden} for hidden in (64, 32)),
    method=(),
    server_rate=30.0,
    rounds=300,
    views="views are for images; DP-FedAvg otherwise",
    training="clients have much text, and each step learns from another part of it",
    full_signal=18.0,
    local_rate=0.5,
    local_steps=20,
    batch_size=64,
    schedule="linear",
    momentum=0.0,
)
SMALLEST_IMAGE = 16  # a side; what is smaller is treated as plain features
CLIP_NORM = 0.1  # S; only S·η_g matters where all updates are clipped
SAMPLE_RATES = (0.1, 0.2, 0.5, 1.0)  # p, the smallest that wins ENOUGH_OF_LIMIT of what p = 1 would give
ENOUGH_OF_LIMIT = 0.9
LARGEST_COHORT = 1000.0  # p·N, for the sake of time
FEWEST_ROUNDS = 300  # T, however much work they are
MOST_WORK = 2_000_000.0  # p·N·T·Q, local steps of all clients: minutes on one GPU
DEFAULT_EPSILON = 2.0  # as in the configuration


def family(shape: tuple[int, ...], model: Any = None, text: bool = False) -> Family:
    """Return the kind of data of a sample of this shape, and what suits it together with a given model."""
    own = None if model is None or (isinstance(model, Mapping) and "name" not in model) else build("model", model)
    if text or getattr(own, "reads_text", False):
        return TEXT
    if len(shape) != 3 or min(shape[1:]) < SMALLEST_IMAGE:
        return FEATURES
    if own is None:
        return CHARACTERS if shape[0] == 1 else PHOTOGRAPHS
    return FIXED.get(own.part_name) or (GREY_NETWORKS if shape[0] == 1 else COLOUR_NETWORKS)
