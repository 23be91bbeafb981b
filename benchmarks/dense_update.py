"""An experiment, not part of the library: a large dense layer's weight gradient and the local update in one kernel.

    python benchmarks/dense_update.py [--models cnn] [--repeats 15]

In the compiled step a large dense layer's gradient is written by a product (bf16) and read again by the update: for
CNN-B 0.5 GB a step, where the update itself moves 1.4 GB. One kernel can do both: it multiplies a tile, updates Δ, and
writes Δ, the next step's bf16 weights and the squares for ‖Δ‖. The script checks the kernel against float64 at several
shapes, looks for the best tiles, then times a round with and without it. On a machine without a GPU, TRITON_INTERPRET=1
makes the check alone. One H200, 16 November 2026: 0.453 ms for the kernel (64 x 64, 17 clients to a program, 3 stages)
against 0.416 + 0.108 for update and product; of a whole round only an earlier version was timed, which gained nothing.
"""

from __future__ import annotations

import argparse
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any

import gpu
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fedblur import client
from fedblur.compiling import Compiled

_aten = torch.ops.aten
_LARGE = 2**16  # weights of a layer; smaller ones are not where the memory goes
_VIEWS = {_aten._unsafe_view.default, _aten.view.default, _aten.transpose.int, _aten.permute.default}
TILES: dict[str, Any] = {"ROWS": 64, "COLUMNS": 64, "GROUP": 17, "STAGES": 3, "FIRST": "evict_normal", "num_warps": 4}
_TRIED = [  # rows, columns, clients to a program, stages, eviction, warps
    (rows, columns, group, stages, evict, warps)
    for rows, columns, warps in [(64, 64, 4), (128, 64, 8), (64, 128, 8), (32, 128, 4), (64, 64, 8)]
    for group, stages in [(17, 3), (34, 3), (68, 3), (136, 3), (34, 4), (136, 4)]
    for evict in ["evict_normal", "evict_first"]
]


@triton.jit
def _update_kernel(
    slope, x, delta, decay, start, new, half, squares,
    clients, outputs, inputs, slope_client, slope_step, slope_row,
    SAMPLES: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """new = (1 − decay)·delta + slopeᵀ·x, half = start + new in bf16, squares[client, row, tile] = Σ new².

    A program takes one tile of several clients: the start, the same for all, is then read once. Otherwise that is a
    third of what the caches deliver, and they are what bounds this kernel.
    """
    tile, band, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles = tl.num_programs(0)
    row, column = band * ROWS + tl.arange(0, ROWS), tile * COLUMNS + tl.arange(0, COLUMNS)
    sample = tl.arange(0, BATCH)
    at, inside = row[:, None] * inputs + column[None, :], (row < outputs)[:, None] & (column < inputs)[None, :]
    base = tl.load(start + at, mask=inside, other=0.0)
    for i in tl.range(0, tl.minimum(GROUP, clients - group * GROUP), num_stages=STAGES):
        place = group.to(tl.int64) * GROUP + i
        weights = place * outputs * inputs
        update = tl.load(delta + weights + at, mask=inside, other=0.0, eviction_policy=FIRST)
        gradient = tl.load(
            slope + place * slope_client + row[:, None] * slope_row + sample[None, :] * slope_step,
            mask=(row < outputs)[:, None] & (sample < SAMPLES)[None, :], other=0.0,
        )  # fmt: skip
        value = tl.load(
            x + place * SAMPLES * inputs + sample[:, None] * inputs + column[None, :],
            mask=(sample < SAMPLES)[:, None] & (column < inputs)[None, :], other=0.0,
        )  # fmt: skip
        update = tl.dot(gradient, value, update - tl.load(decay + place) * update)
        tl.store(new + weights + at, update, mask=inside, eviction_policy=FIRST)
        tl.store(half + weights + at, (base + update).to(tl.bfloat16), mask=inside)
        tl.store(squares + (place * outputs + row) * tiles + tile, tl.sum(update * update, 1), mask=row < outputs)


@torch.library.custom_op("fedblur_try::dense_update", mutates_args=())
def dense_update(
    slope: Tensor, x: Tensor, delta: Tensor, decay: Tensor, start: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`columns` of a tile decide a result's shape: as an argument they are part of what the compiler's cache knows.

    Of slope [clients, outputs, batch], x [clients, batch, inputs] and delta [clients, outputs, inputs]."""
    clients, outputs, inputs = delta.shape
    samples = x.shape[1]
    new, half, squares = _empty(delta, columns)
    if delta.device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        return _plainly(slope, x, delta, decay, start, columns)
    x, delta, start = x.contiguous(), delta.contiguous(), start.contiguous()
    grid = (squares.shape[2], triton.cdiv(outputs, TILES["ROWS"]), triton.cdiv(clients, TILES["GROUP"]))
    _update_kernel[grid](
        slope, x, delta, decay, start, new, half, squares, clients, outputs, inputs,
        slope.stride(0), slope.stride(2), slope.stride(1),
        SAMPLES=samples, BATCH=max(16, triton.next_power_of_2(samples)), **TILES,
    )  # fmt: skip
    return new, half, squares


@dense_update.register_fake
def _(
    slope: Tensor, x: Tensor, delta: Tensor, decay: Tensor, start: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(delta, columns)


def _plainly(
    slope: Tensor, x: Tensor, delta: Tensor, decay: Tensor, start: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch; all squares of a row count for its first tile."""
    _, _, squares = _empty(delta, columns)
    new = delta * (1 - decay)[:, None, None] + slope.float() @ x.float()
    squares.zero_()[:, :, 0] = new.square().sum(2)
    return new, (start + new).bfloat16(), squares


def _empty(delta: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    tiles = -(-delta.shape[2] // columns)
    new = delta.new_empty(delta.shape)
    return new, new.new_empty(delta.shape, dtype=torch.bfloat16), new.new_empty(*delta.shape[:2], tiles)


def fuse(graph: Graph) -> int:
    """Use the kernel wherever a step updates a large dense layer; returns how often."""
    found = [match for node in graph.nodes if (match := _update(node)) is not None]
    for node, product, delta, factors in found:
        weight, start = _weight(node)
        if weight is None:
            continue
        clients = product.meta["val"].shape[0]
        with graph.inserting_before(node):
            decay = graph.call_function(_aten.new_zeros.default, (delta, [clients]))
            if factors:
                flat = [graph.call_function(_aten.reshape.default, (factor, [clients])) for factor in factors]
                decay = graph.call_function(_aten.mul.Tensor, (flat[0], flat[1]))
            call = graph.call_function(
                torch.ops.fedblur_try.dense_update.default, (*product.args, delta, decay, start, TILES["COLUMNS"])
            )
            new, half, squares = (graph.call_function(operator.getitem, (call, i)) for i in range(3))
            sums = graph.call_function(_aten.sum.dim_IntList, (squares, [2]))
        for square in [user for user in node.users if user.target is _aten.pow.Tensor_Scalar]:
            for total in [user for user in square.users if user.target is _aten.sum.dim_IntList]:
                if list(total.args[1]) == [2] and len(total.args) == 2:
                    _replace(graph, total, sums)
        _replace(graph, weight, half)
        _replace(graph, node, new)
    graph.eliminate_dead_code()
    return len(found)


def _replace(graph: Graph, old: Node, new: Node) -> None:
    """Users of the old node come after both: the new ones stand where Δ is updated, and nothing later feeds them."""
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _update(node: Node) -> tuple[Node, Node, Node, tuple[Node, Node] | None] | None:
    """(the new Δ, its product, the old Δ, BLUR's factors) where this node is such an update."""
    if node.target is _aten.addcmul.default and node.kwargs.get("value") == -1:
        total, rate, term = node.args
        plain = _sum(total)
        if plain is None or len(total.users) > 1 or term.target is not _aten.mul.Tensor:
            return None
        factor, delta = term.args
        return (node, *plain, (rate, factor)) if delta is plain[1] and len(term.users) == 1 else None
    plain = _sum(node)
    if plain is None or any(user.target is _aten.addcmul.default for user in node.users):
        return None
    return node, *plain, None


def _sum(node: Node) -> tuple[Node, Node] | None:
    """(product, Δ) of Δ + float32(product)."""
    if node.target is not _aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    delta, gradient = node.args
    if not isinstance(gradient, Node) or gradient.target is not _aten._to_copy.default or delta.op != "placeholder":
        return None
    product = _through_views(gradient.args[0])
    if product is None or product.target is not _aten.bmm.default:
        return None
    value = product.meta["val"]
    same = value.shape == gradient.meta["val"].shape and gradient.meta["val"].is_contiguous()
    return (product, delta) if same and value.dtype == torch.bfloat16 and value[0].numel() >= _LARGE else None


def _through_views(node: Any) -> Node | None:
    """What is looked at; only where each view has no other user. An even number of transpositions is none."""
    while isinstance(node, Node) and node.target in _VIEWS:
        if len(node.users) > 1:
            return None
        node = node.args[0]
    return node if isinstance(node, Node) and len(node.users) == 1 else None


def _weight(node: Node) -> tuple[Node | None, Node | None]:
    """(bf16 weights of the next step, the round's start) if those are computed from the new Δ."""
    for user in node.users:
        if user.target is _aten.add.Tensor and user.args[1] is node and len(user.users) == 1:
            (cast,) = user.users
            if cast.target is _aten._to_copy.default and cast.kwargs.get("dtype") is torch.bfloat16:
                return cast, user.args[0]
    return None, None


class Fused(Compiled):
    """Compiled steps with that kernel."""

    def _by_compiler(self, graph: GraphModule) -> Any:
        count = fuse(graph.graph)
        graph.recompile()
        if self.state:
            print(f"  {count} dense updates fused", flush=True)
        return super()._by_compiler(graph)


def errors(device: torch.device) -> Iterator[tuple[tuple[int, ...], float]]:
    """By shape (clients, batch, outputs, inputs): the largest relative error against float64."""
    generator = torch.Generator().manual_seed(0)
    for shape in [(3, 64, 128, 7744), (2, 29, 128, 7744), (2, 10, 128, 1000), (5, 70, 62, 1100), (1, 1, 200, 523)]:
        clients, batch, outputs, inputs = shape
        sizes = [(clients, batch, outputs), (clients, batch, inputs), (clients, outputs, inputs), (clients,)]
        slope, x, delta, decay = (torch.randn(size, generator=generator).to(device) for size in sizes)
        start = torch.randn(outputs, inputs, generator=generator).to(device)
        half = torch.bfloat16 if device.type == "cuda" else torch.float32  # Triton's interpreter has no bf16 products
        slope, x = slope.to(half).transpose(1, 2), x.to(half)
        new = delta.double() * (1 - decay.double())[:, None, None] + slope.double() @ x.double()
        expected = new, start.double() + new, new.square().sum(2)
        got = dense_update(slope, x, delta, decay, start, TILES["COLUMNS"])
        pairs = zip((got[0], got[1], got[2].sum(2)), expected, strict=True)
        yield shape, max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def choose_tiles(device: torch.device) -> None:
    """The fastest tiles for CNN-B's dense layer."""
    clients, batch, outputs, inputs = 136, 64, 128, 7744
    slope = torch.randn(clients, batch, outputs, device=device).bfloat16().transpose(1, 2)
    x, delta = (
        torch.randn(clients, batch, inputs, device=device).bfloat16(),
        torch.randn(clients, outputs, inputs).to(device),
    )
    decay, start = torch.rand(clients, device=device), torch.randn(outputs, inputs, device=device)
    times = {}
    for tried in _TRIED:
        TILES.update(zip(TILES, tried, strict=True))
        try:
            times[tried] = graphed(lambda: dense_update(slope, x, delta, decay, start, TILES["COLUMNS"]))
        except Exception as error:  # tiles that need more memory than a multiprocessor has
            print(f"{tried}: {type(error).__name__}", flush=True)
            continue
        print(f"{tried}: {times[tried]:.3f} ms", flush=True)
    best = min(times, key=times.__getitem__)
    TILES.update(zip(TILES, best, strict=True))
    print(f"best: {best}", flush=True)
    gradient = torch.empty(clients, outputs, inputs, device=device, dtype=torch.bfloat16)
    print(f"the product alone: {graphed(lambda: torch.bmm(slope, x, out=gradient)):.3f} ms", flush=True)


def graphed(run: Callable[[], Any], times: int = 10) -> float:
    """Milliseconds of one call, of many in a CUDA graph: without the host's part."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return gpu.milliseconds(graph.replay, 5)[1] / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["cnn"], choices=[*gpu.TASKS])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for shape, error in errors(device):
        print(f"{shape}: {error:.1e}", flush=True)
        if error > 5e-3:  # bf16 weights are rounded to 4e-3
            raise SystemExit("the kernel is wrong")
    if device.type == "cpu":
        return
    choose_tiles(device)
    for key in options.models:
        gpu.measure(key, ["compiled"], options.repeats, profile=True)
        client.Compiled = Fused  # type: ignore[misc]
        client._compiled_steps.cache_clear()
        client.many_clients.cache_clear()
        gpu.measure(key, ["compiled"], options.repeats, profile=True)
        client.Compiled = Compiled  # type: ignore[misc]


if __name__ == "__main__":
    main()
