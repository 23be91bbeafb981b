"""Times tile sizes of the convolution kernels on the shapes of our models: where `triton_conv.*_tiles` come from."""

from __future__ import annotations

import itertools

import torch
from triton.testing import do_bench

from fedblur.kernels import triton_conv as tc
from fedblur.kernels.triton_conv import Geometry, Tiles

SHAPES = {
    "CNN-B conv1": Geometry(136, 64, 1, 28, 28, 32, (3, 3), (1, 1), (0, 0), (1, 1)),
    "CNN-B conv2": Geometry(136, 64, 32, 13, 13, 64, (3, 3), (1, 1), (0, 0), (1, 1)),
    "ResNet 64": Geometry(30, 50, 64, 32, 32, 64, (3, 3), (1, 1), (1, 1), (1, 1)),
    "ResNet 128": Geometry(30, 50, 128, 16, 16, 128, (3, 3), (1, 1), (1, 1), (1, 1)),
    "ResNet 512": Geometry(30, 50, 512, 4, 4, 512, (3, 3), (1, 1), (1, 1), (1, 1)),
}


def candidates(kind: str, g: Geometry) -> list[Tiles]:
    own = getattr(tc, f"{kind}_tiles")(g)
    rows = (64, 128, 256) if kind != "weight_grad" else sorted({own.rows, max(16, own.rows // 2)})
    depths = (32, 64, 128) if kind == "weight_grad" or g.channels >= 16 else (16, 32)
    options = itertools.product(rows, sorted({own.columns, max(16, own.columns // 2)}), depths, (4, 8), (2, 3, 4))
    return [Tiles(*option) for option in options if option[0] * option[1] <= 128 * 256]


def main() -> None:
    for name, g in SHAPES.items():
        out_h, out_w = g.out_size
        x = torch.randn(g.clients, g.batch, g.height, g.width, g.channels, device="cuda").bfloat16()
        w = torch.randn(g.clients, g.outputs, *g.kernel, g.channels, device="cuda").bfloat16()
        gy = torch.randn(g.clients, g.batch, out_h, out_w, g.outputs, device="cuda").bfloat16()
        flops = 2 * gy.numel() * g.kernel[0] * g.kernel[1] * g.channels
        runs = {
            "forward": lambda x=x, w=w, g=g: tc.forward(x, w, None, g),
            "input_grad": lambda gy=gy, w=w, g=g: tc.input_grad(gy, w, g),
            "weight_grad": lambda gy=gy, x=x, g=g: tc.weight_grad(gy, x, g),
        }
        for kind, run in runs.items():
            if kind == "input_grad" and g.channels == 1:
                continue  # a first layer needs none
            own, timed = getattr(tc, f"{kind}_tiles"), []
            for tiles in [own(g), *candidates(kind, g)]:
                setattr(tc, f"{kind}_tiles", lambda g, tiles=tiles: tiles)
                try:
                    timed.append((do_bench(run, warmup=2, rep=6), tiles))
                except Exception:  # a tile that does not fit the chip's shared memory
                    continue
            setattr(tc, f"{kind}_tiles", own)
            first, best = timed[0], sorted(timed)[:3]
            print(f"{name:12s} {kind:12s} now {first[0]:.3f} ms {flops / first[0] / 1e9:.0f} TFLOP/s;", end=" ")
            print("best:", "; ".join(f"{ms:.3f} {tuple(tiles)}" for ms, tiles in best), flush=True)


if __name__ == "__main__":
    main()
