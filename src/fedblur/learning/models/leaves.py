"""A linear model on fixed features of small patches, whose filters were learned from drawn images: dead leaves.

`tools/make_leaves.py` draws images of overlapping shapes (the "dead leaves" model of natural images) from a seed, and
learns from their 6x6 patches what Coates, Ng and Lee (2011) learn from photographs: a whitening and a dictionary of
filters. An image's features are the filters' positive and negative responses, averaged over its four quarters; a filter
and its mirror image share theirs, so that an image and its mirror image have the same. No photograph goes in, so the
features cost no privacy; only the head is trained.

For photographs: images of three channels, or of one, which are brought to 32x32.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedblur.core.errors import ConfigError, ModelError
from fedblur.core.registry import register
from fedblur.learning.models.base import average_to, image_shape, require_side
from fedblur.learning.models.fixed_features import stored, with_head

WEIGHTS = Path(__file__).with_name("leaves.npz")
SIDE, PATCH, CELLS = 32, 6, 2
FILTERS = 400  # each with its mirror image
THRESHOLD = 0.25  # of a response, after whitening
FAINT = 10 / 255**2  # added to a patch's variance: where an image is flat, noise is not made into contrast
MOST = 256  # channels that are stored
_AT_ONCE = 64  # images on a GPU; on a CPU one fills a core's cache


@register("model", "leaves")
@dataclass(frozen=True)
class Leaves:
    """Photographs; the fewest trained parameters for what it can tell apart."""

    channels: int = MOST  # filters; four features each

    def __post_init__(self) -> None:
        if not 1 <= self.channels <= MOST:
            raise ConfigError(f"model.leaves.channels={self.channels} must be between 1 and {MOST}")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, *_ = image_shape("leaves", shape)
        require_side("leaves", shape, 8)
        if channels not in (1, 3):
            raise ModelError(f'shape={tuple(shape)} does not fit model "leaves", which reads one or three channels')
        return with_head(LeafFeatures(self.channels), self.channels * CELLS**2, classes, repr(self))


class LeafFeatures(nn.Module):
    """[batch, 1 or 3, H, W] -> [batch, 4·channels]; constants throughout."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        constants = stored(WEIGHTS)
        self.responses = Responses(constants["filters"], constants["bias"])
        self.mean = nn.Parameter(constants["mean"], requires_grad=False)
        self.basis = nn.Parameter(constants["basis"][:, :channels].contiguous(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (SIDE, SIDE):
            x = F.interpolate(x, (SIDE, SIDE), mode="bilinear", antialias=True)
        x = x.expand(-1, 3, -1, -1)
        parts = torch.split(x, 1 if x.device.type == "cpu" else _AT_ONCE)
        pooled = torch.cat([self.responses(part) for part in parts])  # [batch, channels, cells]
        features: Tensor = ((pooled.transpose(1, 2) - self.mean) @ self.basis).flatten(1)
        return features


class Responses(nn.Module):
    """The response of each filter in each quarter of an image: [batch, 3, 32, 32] -> [batch, 800, 4]."""

    def __init__(self, filters: Tensor, bias: Tensor) -> None:
        super().__init__()
        filters = filters - filters.mean((1, 2, 3), keepdim=True)  # 0 but for the rounding of what is stored
        both = torch.cat([filters, filters.flip(-1)])
        self.filters = nn.Parameter(both.contiguous(memory_format=torch.channels_last), requires_grad=False)
        self.bias = nn.Parameter(torch.cat([bias, bias])[:, None, None], requires_grad=False)
        places = SIDE - PATCH + 1
        self.average = average_to(CELLS, places, places)

    def forward(self, x: Tensor) -> Tensor:
        # 1 over each patch's standard deviation. Filters have mean 0, so a patch's mean needs no subtraction.
        values = 3 * PATCH**2
        mean = F.avg_pool2d(x.mean(1, keepdim=True), PATCH, 1)
        square = F.avg_pool2d(x.square().mean(1, keepdim=True), PATCH, 1)
        variance = (square - mean.square()).clamp(min=0) * (values / (values - 1))
        contrast = torch.rsqrt(variance + FAINT)
        answer = F.conv2d(x, self.filters).mul_(contrast).add_(self.bias)  # in place: twice as fast on a CPU
        up = (answer - THRESHOLD).relu_()
        down = answer.abs_().sub_(THRESHOLD).relu_().sub_(up)
        cells = torch.stack([self.average(up), self.average(down)], 1)
        filters, mirrored = cells.chunk(2, dim=2)
        return ((filters + mirrored.flip(-1)) / 2).flatten(1, 2).flatten(2)
