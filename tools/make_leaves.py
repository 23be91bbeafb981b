"""Make the file learning/models/leaves.npz: filters for patches, and their features' axes, learned from drawn images.

    python tools/make_leaves.py [--images 10000] [--patches 100000] [--seed 0] [--out FILE]

An image is a heap of dead leaves: ellipses, boxes and lobed shapes of all sizes, each with its own colour, shading and
grain, one on top of the other. Patches of such images have edges, corners and colour contrasts much like those of
photographs (Lee, Mumford and Huang 2001; Baradad et al. 2021 learn whole networks from them). The filters come from
them as in Coates and Ng (2012): contrast normalisation, whitening, spherical k-means. No photograph goes in: the only
input is a seed, and no figure of the drawings was set by a look at one. What is made of the patches was screened on
images of CIFAR-10's training set (docs/decisions/0062): mirrored pairs, every place, the axes and SMOOTHED.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.learning.models.leaves import CELLS, FAINT, FILTERS, MOST, PATCH, SIDE, WEIGHTS, Responses

DRAWN = 2 * SIDE  # pixels a side, before the image is made smaller
SHAPES, LARGE = 40, 8  # in an image; the first are large
SMALLEST, LARGEST = 0.06, 0.9  # radii, with a density of r^-3; the image is 2 wide
WHITENED = 0.1  # added to the variances of patches
NORM = 5.0  # of a feature vector, on average over drawings
SMOOTHED = 0.001  # added to the components' variances, in units of the largest


def heaps(count: int, dice: torch.Generator) -> Tensor:
    """Images [count, 3, 32, 32] in 0..1."""
    axis = (torch.arange(DRAWN) + 0.5) / DRAWN * 2 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    image = _surface(count, x, y, dice)
    for number in range(SHAPES):
        leaf = _outline(count, x, y, large=number < LARGE, dice=dice)
        image = torch.where(leaf[:, None], _surface(count, x, y, dice), image)
    return F.interpolate(image, (SIDE, SIDE), mode="area").clamp(0, 1)


def _surface(count: int, x: Tensor, y: Tensor, dice: torch.Generator) -> Tensor:
    """A colour, brighter to one side, with grain: [count, 3, DRAWN, DRAWN]."""
    grey = 0.47 + 0.22 * _normal(count, dice)
    warm, green = 0.10 * _normal(count, dice), 0.05 * _normal(count, dice)
    colour = torch.cat([grey + warm + green / 2, grey - green, grey - warm + green / 2], 1)
    angle = 2 * math.pi * _uniform(count, dice)
    shade = 0.12 * _normal(count, dice) * (x * angle.cos() + y * angle.sin())
    slope = 0.5 + 1.5 * float(torch.rand((), generator=dice))
    return colour + shade + 0.15 * _uniform(count, dice) ** 2 * _grain(count, slope, dice)


def _grain(count: int, slope: float, dice: torch.Generator) -> Tensor:
    """Noise whose amplitude falls with frequency to the power of `slope`; standard deviation 1."""
    across, along = torch.fft.fftfreq(DRAWN), torch.fft.rfftfreq(DRAWN)
    fall = ((across[:, None] ** 2 + along**2).sqrt() + 1 / DRAWN).pow(-slope)
    waves = torch.view_as_complex(torch.randn(count, 1, *fall.shape, 2, generator=dice)) * fall
    noise = torch.fft.irfft2(waves, s=(DRAWN, DRAWN))
    noise = noise - noise.mean((2, 3), keepdim=True)
    return noise / noise.std((2, 3), keepdim=True)


def _outline(count: int, x: Tensor, y: Tensor, large: bool, dice: torch.Generator) -> Tensor:
    """Which pixels a shape covers: [count, DRAWN, DRAWN]."""
    u = _uniform(count, dice)
    radius = 0.25 + 0.5 * u if large else (u * (LARGEST**-2 - SMALLEST**-2) + SMALLEST**-2) ** -0.5
    right, down = x - (2.4 * _uniform(count, dice) - 1.2), y - (2.4 * _uniform(count, dice) - 1.2)
    angle, stretch = math.pi * _uniform(count, dice), torch.exp(0.5 * _normal(count, dice))
    a = (right * angle.cos() + down * angle.sin()) / radius / stretch
    b = (down * angle.cos() - right * angle.sin()) / radius * stretch
    lobes = torch.randint(2, 7, (count, 1, 1, 1), generator=dice)
    wave = torch.cos(lobes * torch.atan2(b, a) + 2 * math.pi * _uniform(count, dice))
    far, kind = (a**2 + b**2).sqrt(), _uniform(count, dice)
    box = (a.abs() < 0.85) & (b.abs() < 0.85)
    return torch.where(kind < 0.35, far < 1, torch.where(kind < 0.65, box, far < 0.8 + 0.25 * wave))[:, 0]


def _uniform(count: int, dice: torch.Generator) -> Tensor:
    return torch.rand(count, 1, 1, 1, generator=dice)


def _normal(count: int, dice: torch.Generator) -> Tensor:
    return torch.randn(count, 1, 1, 1, generator=dice)


def patches(images: Tensor, count: int, dice: torch.Generator) -> Tensor:
    """Patches [count, 108] at random places, each with mean 0 and contrast 1."""
    places = SIDE - PATCH + 1
    which = torch.randint(len(images), (count,), generator=dice)
    top, left = torch.randint(places, (2, count), generator=dice)
    reach = torch.arange(PATCH)
    rows, columns = (top[:, None] + reach)[:, :, None], (left[:, None] + reach)[:, None, :]
    cut = images[which[:, None, None], :, rows, columns].permute(0, 3, 1, 2).flatten(1)
    cut = cut - cut.mean(1, keepdim=True)
    return cut / (cut.var(1, keepdim=True) + FAINT).sqrt()


def mirror(filters: Tensor) -> Tensor:
    return filters.view(-1, 3, PATCH, PATCH).flip(-1).flatten(1)


def learned(cut: Tensor, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Filters [FILTERS, 3, 6, 6] on patches that are not whitened yet, and their biases."""
    both = torch.cat([cut, mirror(cut)]).double()  # so that the whitening of a mirrored patch is the mirrored one
    mean = both.mean(0)
    variances, vectors = torch.linalg.eigh(torch.cov(both.T))
    whitening = vectors @ torch.diag((variances + WHITENED).rsqrt()) @ vectors.T
    dictionary = _centres((cut - mean.float()) @ whitening.float(), dice).double()
    filters = dictionary @ whitening
    bias = -(dictionary @ (whitening @ mean))
    return (filters - filters.mean(1, keepdim=True)).view(-1, 3, PATCH, PATCH).float(), bias.float()


def _centres(points: Tensor, dice: torch.Generator, rounds: int = 10) -> Tensor:
    """Directions that points lie along, with either sign: spherical k-means."""
    centres = F.normalize(torch.randn(FILTERS, points.shape[1], generator=dice), dim=1)
    for _ in range(rounds):
        along = points @ centres.T
        nearest = along.abs().argmax(1)
        length = along.gather(1, nearest[:, None])
        centres = F.normalize(centres.index_add(0, nearest, points * length), dim=1)
    return centres


@torch.no_grad()
def axes(responses: Responses, images: Tensor) -> tuple[Tensor, Tensor]:
    """The mean response of each channel, and the principal axes of channels [800, MOST], scaled alike."""
    pooled = torch.cat([responses(image) for image in images.split(1)]).transpose(1, 2)  # [images, cells, channels]
    points = pooled.flatten(0, 1).double()
    mean = points.mean(0)
    variances, vectors = torch.linalg.eigh(torch.cov(points.T))
    variances, vectors = variances.flip(0)[:MOST], vectors.flip(1)[:, :MOST]
    basis = vectors / (variances + SMOOTHED * variances[0]).sqrt()
    length = ((points - mean) @ basis).view(len(images), CELLS**2 * MOST).norm(dim=1).mean()
    return mean.float(), (basis * (NORM / length)).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10000)
    parser.add_argument("--patches", type=int, default=100000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--sheet", type=Path, help="also save 100 drawings as one image, to look at")
    options = parser.parse_args()
    dice = torch.Generator().manual_seed(options.seed)
    images = torch.cat([heaps(min(250, options.images - i), dice) for i in range(0, options.images, 250)])
    print(f"{len(images)} images drawn", flush=True)
    filters, bias = learned(patches(images, options.patches, dice), dice)
    print(f"{len(filters)} filters learned", flush=True)
    mean, basis = axes(Responses(filters, bias), images)
    stored = {"filters": filters, "bias": bias, "mean": mean, "basis": basis}
    np.savez_compressed(options.out, **{name: value.numpy().astype(np.float16) for name, value in stored.items()})
    print(f"{options.out}: {options.out.stat().st_size / 1024:.0f} KiB")
    if options.sheet is not None:
        save_sheet(images[:100], options.sheet)


def save_sheet(images: Tensor, path: Path) -> None:
    from PIL import Image

    rows = torch.cat(list(torch.cat(list(images), 2).split(10 * SIDE, 2)), 1)
    Image.fromarray((rows * 255).byte().permute(1, 2, 0).numpy()).resize((1280, 1280)).save(path)


if __name__ == "__main__":
    main()
