"""What each part of accel/ brings: time of a round without the part, by that with it.

    python benchmarks/accel_parts.py [--parts …] [--workloads W W-small] [--turns 3]
    python benchmarks/accel_parts.py --gpu [--parts …] [--workloads cnn gn_cnn resnet18]

On a CPU it is CPU time, the least of several turns, with and without alternating in processes of their own, so that it
can be taken on a machine that also does other work. On a GPU it is the clock, the median of nine rounds of a process.
A part under 1.05 on every workload is not worth its lines.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent

# How to do without a part: what its function is replaced by before a run is set up. "" is the environment.
PARTS = {
    "replay": ("fedblur.accel.replay", "_MOST", "0"),
    "rewrites: products": ("fedblur.accel.replay", "add_in_products", "lambda *_: None"),
    "rewrites: memory": ("fedblur.accel.replay", "reuse_memory", "lambda *_: None"),
    "replay: merge repeated": ("fedblur.accel.replay", "_merge_repeated", "lambda *_: None"),
    "replay: direct calls": ("fedblur.accel.replay", "_DIRECT", "{}"),
    "malloc": ("fedblur.accel.cpu", "keep_freed_memory", "lambda: False"),
    "cpu_layers: bias": (
        "fedblur.accel.kernels.cpu_layers",
        "_convolution",
        "lambda c: module._note_convolution(c, c.by_torch())",
    ),
    "cpu_layers: dense": ("fedblur.accel.kernels.cpu_layers", "_has_onednn", "lambda: False"),
    "cpu_layers: flatten": ("fedblur.accel.kernels.cpu_layers", "_flat", "lambda func, *args: func(*args)"),
    "pooled": ("", "FEDBLUR_NATIVE", "off"),
}
GPU_PARTS = {
    "cuda_graph": ("", "FEDBLUR_CUDA_GRAPHS", "off"),
    "step_pipeline": ("fedblur.accel.compile", "halves", "lambda *_: None"),
    "dense_update": ("fedblur.accel.compile", "fuse_updates", "lambda graph: None"),
    "triton_conv_pool": ("fedblur.accel.kernels.fused_layers", "_max_pool", "lambda *_, **__: None"),
    "relu and dropout": ("fedblur.accel.kernels.fused_layers", "before_relu", "lambda input: None"),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="measure the parts for GPUs, on this one")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, *GPU_PARTS])
    parser.add_argument("--workloads", nargs="+")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--round", nargs=2, help=argparse.SUPPRESS)  # a process of its own: workload, part or "all"
    options = parser.parse_args()
    options.parts = options.parts or [*(GPU_PARTS if options.gpu else PARTS)]
    options.workloads = options.workloads or (["cnn", "gn_cnn", "resnet18"] if options.gpu else ["W", "W-small"])
    return options


def without(part: str) -> None:
    """Switch a part off in this process, before anything of it is imported elsewhere."""
    name, attribute, value = (PARTS | GPU_PARTS)[part]
    if not name:
        os.environ[attribute] = value
        return
    module = importlib.import_module(name)
    if not hasattr(module, attribute):
        raise SystemExit(f"{name} has no {attribute}: correct PARTS")
    setattr(module, attribute, eval(value, {"module": module}))  # noqa: S307


def round_time(name: str) -> float:
    """Return the CPU seconds of a round: all threads, the system's part too."""
    from harness.workloads import WORKLOADS
    from peers.ours import prepare_run, run_round, suitable_threads

    workload = next(workload for workload in WORKLOADS if workload.name == name)
    task, best = workload.task(), float("inf")
    rounds = 60 if name == "W-small" else 3
    with tempfile.TemporaryDirectory() as folder:
        setup = prepare_run(task, Path(folder))
        with suitable_threads(setup.initial.device, setup.protocol.layout.total):
            for _ in range(3):
                run_round(task, setup)
            for _ in range(5):
                began = time.process_time()
                for _ in range(rounds):
                    run_round(task, setup)
                best = min(best, (time.process_time() - began) / rounds)
    return best


def gpu_round_time(name: str) -> float:
    """Return the seconds of a compiled round on this GPU."""
    import torch
    from gpu import TASKS, milliseconds, ours

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    task = TASKS[name]
    return milliseconds(ours(task, task.module(), task.population(), "compiled"), 9)[1] / 1e3


def in_process(workload: str, part: str, gpu: bool = False) -> float:
    command = [sys.executable, __file__, "--round", workload, part, *(["--gpu"] if gpu else [])]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{workload} without {part}: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def on_cpu(options: argparse.Namespace) -> None:
    print("CPU time of a round without the part, by that with it:")
    for part in options.parts:
        figures = []
        for workload in options.workloads:
            turns = [(in_process(workload, part), in_process(workload, "all")) for _ in range(options.turns)]
            apart, together = (min(times) for times in zip(*turns, strict=True))
            figures.append(f"{workload} {apart / together:.3f}")
        print(f"  {part:24} {', '.join(figures)}", flush=True)


def on_gpu(options: argparse.Namespace) -> None:
    """Compile all variants side by side, which takes minutes; then time them one after another."""
    for workload in options.workloads:
        variants = ["all", *options.parts]
        began = time.perf_counter()
        with ThreadPoolExecutor(len(variants)) as pool:
            list(pool.map(lambda part: in_process(workload, part, gpu=True), variants))  # noqa: B023
        print(f"{workload}: compiled in {time.perf_counter() - began:.0f} s; a round without the part, by one with it:")
        times = {part: in_process(workload, part, gpu=True) for part in [*variants, "all again"]}
        together = min(times["all"], times["all again"])
        for part, seconds in times.items():
            print(f"  {part:24} {seconds / together:.3f} ({1e3 * seconds:.1f} ms)", flush=True)


def main() -> None:
    options = parse()
    if not options.round:
        (on_gpu if options.gpu else on_cpu)(options)
        return
    workload, part = options.round
    if not part.startswith("all"):
        without(part)
    print(gpu_round_time(workload) if options.gpu else round_time(workload))


if __name__ == "__main__":
    main()
