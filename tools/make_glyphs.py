"""Make the file learning/models/glyphs.npz: a network that tells drawn glyphs apart, and its features' axes.

    python tools/make_glyphs.py [--steps 8000] [--classes 3000] [--device cuda] [--out FILE]

A glyph is one to four pen strokes (lines, curves, loops; most start where another ends) with random control points: a
made-up character. Each time it is drawn, its points move a little, it is turned, slanted and stretched, and the pen's
width changes; then it is brought to a common size, as scans of writing are. The network learns which of the made-up
characters it sees. No image goes in: the only input is a seed. The pen's width and the margins were set by hand, with a
look at two numbers of EMNIST (the mean brightness and the share of light pixels) and at two dozen of its images.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedblur.learning.models.glyphs import CELLS, MOST, SIDE, WEIGHTS, WIDTHS, glyph_network

STROKES, POINTS = 4, 32


def made_up(classes: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """How many strokes each character has, and their control points [classes, strokes, 4, 2] in about [-1, 1]²."""
    count = torch.randint(1, STROKES + 1, (classes,), generator=dice)
    points = torch.rand(classes, STROKES, 4, 2, generator=dice) * 2 - 1
    kind = torch.rand(classes, STROKES, 1, 1, generator=dice)
    first, last = points[:, :, :1], points[:, :, 3:]
    line = first + (last - first) * torch.linspace(0, 1, 4)[:, None]
    loop = torch.cat([first, 1.6 * points[:, :, 1:3], first], dim=2)
    points = torch.where(kind < 0.4, line, torch.where(kind > 0.8, loop, points))
    for stroke in range(1, STROKES):
        joined = torch.rand(classes, 1, 1, generator=dice) < 0.6
        gap = (points[:, stroke - 1, 3] - points[:, stroke, 0])[:, None]
        moved = points[:, stroke] + gap * torch.tensor([1.0, 0.66, 0.33, 0.0])[:, None]
        points[:, stroke] = torch.where(joined, moved, points[:, stroke])
    return count, points


def drawn(count: Tensor, points: Tensor, dice: torch.Generator) -> Tensor:
    """Images [n, 1, 28, 28] in 0..1 of these characters, each in a hand of its own."""
    n = len(count)
    points = points + 0.09 * torch.randn(points.shape, generator=dice)
    turn, slant, stretch = torch.randn(3, n, generator=dice) * torch.tensor([0.14, 0.15, 0.12])[:, None]
    stretch = stretch.exp()
    across = torch.stack([turn.cos() * stretch, slant - turn.sin()], -1)
    along = torch.stack([turn.sin(), turn.cos() / stretch], -1)
    points = torch.einsum("nij,nskj->nski", torch.stack([across, along], 1), points)
    t = torch.linspace(0, 1, POINTS)
    bezier = torch.stack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], -1)
    path = torch.einsum("pk,nskj->nspj", bezier, points)
    there = torch.arange(STROKES) < count[:, None]
    path = torch.where(there[:, :, None, None], path, path[:, :1, :1]).flatten(1, 2)
    pen = torch.rand(n, 1, generator=dice) * 0.8 + 1.1
    low, high = path.amin(1), path.amax(1)
    size = (high - low).amax(1, keepdim=True).clamp(min=0.2)
    room = (SIDE - 4 - 2 * pen) * (torch.rand(n, 1, generator=dice) * 0.1 + 0.93)
    path = (path - (low + high)[:, None] / 2) / size[:, None] * room[:, None] + (SIDE - 1) / 2
    axis = torch.arange(SIDE).float()
    pixels = torch.cartesian_prod(axis, axis).flip(1)  # (x, y), row by row
    distance = torch.cdist(path, pixels.expand(n, -1, -1)).amin(1)
    return torch.sigmoid(3 * (pen - distance)).view(n, 1, SIDE, SIDE)


def trained(classes: int, steps: int, device: torch.device, dice: torch.Generator, batch: int = 128) -> nn.Sequential:
    count, points = made_up(classes, dice)
    body, head = glyph_network().to(device), nn.Linear(WIDTHS[-1] * CELLS**2, classes).to(device)
    body = body.to(memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=3e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda t: 0.5 * (1 + math.cos(math.pi * t / steps)) * min(1, (t + 1) / 200)
    )
    began, right = time.time(), 0.0
    for step in range(1, steps + 1):
        which = torch.randint(classes, (batch,), generator=dice)
        x = drawn(count[which], points[which], dice).to(device, memory_format=torch.channels_last)
        which = which.to(device)
        logits = head(body(x))
        optimiser.zero_grad()
        F.cross_entropy(logits, which, label_smoothing=0.1).backward()
        optimiser.step()
        schedule.step()
        right += float((logits.argmax(1) == which).float().mean())
        if step % 250 == 0 or step == steps:
            done = step % 250 or 250
            print(f"step {step} of {steps}: {100 * right / done:.1f} % right, {time.time() - began:.0f} s", flush=True)
            right = 0.0
    return body.eval()


@torch.no_grad()
def axes(body: nn.Sequential, device: torch.device, dice: torch.Generator, count: int) -> dict[str, Tensor]:
    """Of the network's output on new characters the mean, the principal axes [576, MOST] and variances along them."""
    strokes, points = made_up(count, dice)
    pairs = zip(strokes.split(500), points.split(500), strict=True)
    output = torch.cat([body(drawn(*pair, dice).to(device)).cpu() for pair in pairs])
    variances, vectors = torch.linalg.eigh(torch.cov(output.T))
    variances = variances.flip(0)[:MOST]
    return {"mean": output.mean(0), "axes": vectors.flip(1)[:, :MOST], "variances": variances}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--classes", type=int, default=3000)
    parser.add_argument("--drawings", type=int, default=12000, help="new characters for the principal axes")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    dice = torch.Generator().manual_seed(options.seed)
    body = trained(options.classes, options.steps, options.device, dice)
    stored = {**body.state_dict(), **axes(body, options.device, dice, options.drawings)}
    arrays = {name: tensor.cpu().contiguous().numpy().astype(np.float16) for name, tensor in stored.items()}
    np.savez_compressed(options.out, **arrays)
    print(f"{options.out}: {options.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
