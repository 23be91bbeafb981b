"""Times tile sizes of the convolution kernels on the shapes of our models: where the `*_tiles` functions come from.

    python benchmarks/tune_kernels.py [--shapes cnn resnet] [--kinds weight_grad] [--programs 528 2112] [--warm 12]

`--programs` are the numbers of programs that a weight gradient's sums are split into, to be tried. Compiling takes
most of the time, so `--warm` processes fill Triton's cache first, each with its share of the tiles.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton.testing import do_bench_cudagraph

from fedblur.accel.kernels import triton_conv as conv
from fedblur.accel.kernels import triton_conv_pool as pool
from fedblur.accel.kernels.geometry import Geometry
from fedblur.accel.kernels.triton_common import PROGRAMS, Tiles

SHAPES = {
    "cnn conv1+pool": Geometry(136, 64, 1, 28, 28, 32, (3, 3), (1, 1), (0, 0), (1, 1)),
    "cnn conv2": Geometry(136, 64, 32, 13, 13, 64, (3, 3), (1, 1), (0, 0), (1, 1)),
    "cnn_a conv2+pool": Geometry(136, 64, 32, 26, 26, 64, (3, 3), (1, 1), (0, 0), (1, 1)),
    "resnet 64": Geometry(30, 50, 64, 32, 32, 64, (3, 3), (1, 1), (1, 1), (1, 1)),
    "resnet 128": Geometry(30, 50, 128, 16, 16, 128, (3, 3), (1, 1), (1, 1), (1, 1)),
    "resnet 256": Geometry(30, 50, 256, 8, 8, 256, (3, 3), (1, 1), (1, 1), (1, 1)),
    "resnet 512": Geometry(30, 50, 512, 4, 4, 512, (3, 3), (1, 1), (1, 1), (1, 1)),
}
Trial = tuple[str, str, Any, Geometry, Tiles, int, Callable[[], Any]]


def candidates(kind: str, g: Geometry, own: Tiles) -> list[Tiles]:
    if g.channels < 16:
        depths = (own.depth,) if kind == "forward" else (64, 128, 256)
        options = itertools.product((64, 128, 256), (own.columns,), depths, (2, 4, 8), (1, 2, 3))
        if kind == "weight_grad":
            options = itertools.product((own.rows,), (own.columns,), depths, (2, 4, 8), (1, 2, 3))
    elif kind == "weight_grad":
        options = itertools.product((64, 128), (32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3))
    else:
        most = g.channels if kind == "input_grad" else g.outputs
        options = itertools.product(
            (64, 128, 256), {min(most, n) for n in (32, 64, 128)}, (32, 64), (4, 8), (1, 2, 3, 4)
        )
    chosen = [Tiles(*option) for option in options]
    return [
        own,
        *(t for t in chosen if t.rows * t.columns <= 128 * 256 and t.columns <= max(32, g.channels, g.outputs)),
    ]


def trials(options: argparse.Namespace) -> Iterator[Trial]:
    for name in (n for n in SHAPES if n.split()[0] in options.shapes):
        g, pooled = SHAPES[name], name.endswith("+pool")
        out_h, out_w = g.pooled_size if pooled else g.out_size
        x = torch.randn(g.clients, g.batch, g.height, g.width, g.channels, device="cuda").bfloat16()
        w = torch.randn(g.clients, g.outputs, *g.kernel, g.channels, device="cuda").bfloat16()
        gy = torch.randn(g.clients, g.batch, out_h, out_w, g.outputs, device="cuda").bfloat16()
        where = torch.randint(0, 5, gy.shape, device="cuda", dtype=torch.uint8)
        runs: dict[str, tuple[Any, Callable[[], Any]]] = {
            "forward": (conv, lambda x=x, w=w, g=g: conv.forward(x, w, None, g)),
            "input_grad": (conv, lambda gy=gy, w=w, g=g: conv.input_grad(gy, w, g)),
            "weight_grad": (conv, lambda gy=gy, x=x, g=g: conv.weight_grad(gy, x, g)),
        }
        if pooled:
            runs = {
                "forward": (pool, lambda x=x, w=w, g=g: pool.forward(x, w, None, g, True)),
                "input_grad": (pool, lambda gy=gy, h=where, w=w, g=g: pool.input_grad(gy, h, w, g)),
                "weight_grad": (pool, lambda gy=gy, h=where, x=x, g=g: pool.weight_grad(gy, h, x, g)),
            }
        for kind, (module, run) in runs.items():
            if kind not in options.kinds or (kind == "input_grad" and g.channels == 1):
                continue  # a first layer needs none
            for tiles in candidates(kind, g, getattr(module, f"{kind}_tiles")(g)):
                for programs in options.programs if kind == "weight_grad" else [PROGRAMS]:
                    yield name, kind, module, g, tiles, programs, run


def attempt(trial: Trial, measure: Callable[[Callable[[], Any]], float]) -> float | None:
    _, kind, module, _, tiles, programs, run = trial
    own = getattr(module, f"{kind}_tiles")
    setattr(module, f"{kind}_tiles", lambda g: tiles)
    conv.PROGRAMS = pool.PROGRAMS = programs
    try:
        return measure(run)
    except Exception:  # a tile that does not fit the chip
        return None
    finally:
        setattr(module, f"{kind}_tiles", own)
        conv.PROGRAMS = pool.PROGRAMS = PROGRAMS


def once(run: Callable[[], Any]) -> float:
    run()
    torch.cuda.synchronize()
    return 0.0


def show(name: str, kind: str, g: Geometry, timed: list[tuple[float, Tiles, int]]) -> None:
    flops = 2 * g.clients * g.batch * g.out_size[0] * g.out_size[1] * g.outputs * g.kernel[0] * g.kernel[1] * g.channels
    best = "; ".join(f"{ms:.3f} {tuple(tiles)} {programs}" for ms, tiles, programs in sorted(timed)[:6])
    print(
        f"{name:16s} {kind:12s} now {timed[0][0]:.3f} ms {flops / timed[0][0] / 1e9:.0f} TFLOP/s; best: {best}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["cnn", "cnn_a", "resnet"])
    parser.add_argument("--kinds", nargs="+", default=["forward", "input_grad", "weight_grad"])
    parser.add_argument("--programs", nargs="+", type=int, default=[PROGRAMS])
    parser.add_argument("--warm", type=int, default=12)
    parser.add_argument("--part", type=int, help="fill Triton's cache with this share of the tiles, measure nothing")
    options = parser.parse_args()
    if options.part is not None:
        for trial in itertools.islice(trials(options), options.part, None, options.warm):
            attempt(trial, once)
        return
    for process in [subprocess.Popen([*sys.orig_argv, "--part", str(part)]) for part in range(options.warm)]:
        process.wait()
    for (name, kind), group in itertools.groupby(trials(options), key=lambda trial: trial[:2]):
        tried = list(group)
        times = [(attempt(trial, lambda run: do_bench_cudagraph(run, rep=6)), *trial[4:6]) for trial in tried]
        show(name, kind, tried[0][3], [(ms, tiles, programs) for ms, tiles, programs in times if ms is not None])


if __name__ == "__main__":
    main()
