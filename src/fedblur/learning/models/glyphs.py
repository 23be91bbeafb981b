"""A linear model on features of a fixed network that has learned to tell drawn glyphs apart.

The network was trained by `tools/make_glyphs.py` to recognise thousands of made-up characters, each a few random pen
strokes, under changes of slant, width and shape. No image that anybody wrote or took went in (the pen's width was set
by hand to that of a public benchmark, EMNIST), so it costs no privacy. Only the head is trained: 8 or 16 thousand
parameters on 62 classes instead of a million, and noise grows with √d. The features are the principal components of the
network's output on such glyphs, brought closer to each other in scale: noise is alike in all directions, so each should
be worth its noise.

For dark or light writing on a plain ground: images of one channel, which are brought to 28x28.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedblur.core.errors import ConfigError, ModelError
from fedblur.core.registry import register
from fedblur.learning.models.base import average_to, conv, image_shape, require_side
from fedblur.learning.models.fixed_features import stored, with_head
from fedblur.learning.models.gn_resnet import Residual

WEIGHTS = Path(__file__).with_name("glyphs.npz")
SIDE, CELLS, WIDTHS = 28, 3, (24, 32, 64)
MOST = 256  # features that are stored
LENGTH = 5.0  # of all of them together, for a drawn glyph


@register("model", "glyphs")
@dataclass(frozen=True)
class Glyphs:
    """Grey images of writing; the fewest trained parameters for what it can tell apart."""

    features: int = 128  # principal components that the trained layer reads
    smoothing: float = 0.1  # near 0 all components are scaled alike; the larger, the more they keep of their own

    def __post_init__(self) -> None:
        if not 0 < self.smoothing < math.inf:
            raise ConfigError(f"model.glyphs.smoothing={self.smoothing} must be above 0 and finite")
        if not 1 <= self.features <= MOST:
            raise ConfigError(f"model.glyphs.features={self.features} must be between 1 and {MOST}")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, *_ = image_shape("glyphs", shape)
        require_side("glyphs", shape, 8)
        if channels != 1:
            raise ModelError(f'shape={tuple(shape)} does not fit model "glyphs", which reads one channel of writing')
        front = GlyphFeatures(self.features, self.smoothing)
        return with_head(front, self.features, classes, repr(self))


class GlyphFeatures(nn.Module):
    """[batch, 1, H, W] -> [batch, features]; constants throughout."""

    def __init__(self, features: int, smoothing: float) -> None:
        super().__init__()
        constants = stored(WEIGHTS)
        mean, axes, variances = (constants.pop(name) for name in ("mean", "axes", "variances"))
        basis = axes / (variances + smoothing * variances[0]).sqrt()
        length = (variances / (variances + smoothing * variances[0])).sum().sqrt()  # of a drawn glyph's features
        self.body = glyph_network()
        self.body.load_state_dict(constants, assign=True)  # also where a model is only sized, without memory
        self.mean = nn.Parameter(mean, requires_grad=False)
        self.basis = nn.Parameter((basis * (LENGTH / length))[:, :features].contiguous(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (SIDE, SIDE):
            x = F.interpolate(x, (SIDE, SIDE), mode="bilinear", antialias=True)
        # Light on dark: an image with a light edge is inverted.
        edge = (x[..., 0, :] + x[..., -1, :] + x[..., :, 0] + x[..., :, -1]).mean(-1, keepdim=True)[..., None] / 4
        features: Tensor = (self.body(torch.where(edge > 0.5, 1 - x, x)) - self.mean) @ self.basis
        return features


def glyph_network() -> nn.Sequential:
    """Return the network that tells glyphs apart, without its last layer: [batch, 1, 28, 28] -> [batch, 576]."""
    stem, *widths = WIDTHS
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        stem=conv(1, stem, 5), pool=nn.MaxPool2d(2), norm=nn.GroupNorm(8, stem), relu=nn.ReLU()
    )
    layers["block1"] = Residual(stem, widths[0], shrink=False, standardise=False)
    layers["block2"] = Residual(widths[0], widths[1], shrink=True, standardise=False)
    layers["average"] = average_to(CELLS, SIDE // 4, SIDE // 4)
    layers["flatten"] = nn.Flatten()
    return nn.Sequential(layers)
