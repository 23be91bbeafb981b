"""The GPU's kernels are compiled ahead for GPUs that are not here: they compile, and fit into a multiprocessor."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedblur.accel import kernels
from fedblur.accel.kernels import operators
from fedblur.accel.kernels.geometry import Geometry
from fedblur.core.hashing import threshold
from tests.accel.kernels.absent import MEMORY, pretend

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux only"
)

KERNELS = sorted(Path(kernels.__file__).parent.glob("triton_*.py"))
CNN_B = [  # clients, batch, channels, height, width, outputs, kernel, stride, padding, dilation
    (2, 64, 1, 28, 28, 32, (3, 3), (1, 1), (0, 0), (1, 1)),
    (2, 64, 32, 13, 13, 64, (3, 3), (1, 1), (0, 0), (1, 1)),
]
RESNET = [
    (2, 50, 64, 32, 32, 64, (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 50, 256, 8, 8, 512, (3, 3), (2, 2), (1, 1), (1, 1)),
]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("capability", "shapes"),
    [(89, CNN_B), *(pytest.param(c, CNN_B + RESNET, marks=pytest.mark.long) for c in (80, 89, 90, 100))],
    ids=["89-cnn", "80", "89", "90", "100"],
)
def test_kernels__compile_and_fit_into_a_multiprocessor(
    capability: int, shapes: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = pretend(capability, monkeypatch)
    call_convolutions(shapes)
    call_others()
    written = {f"fedblur.accel.kernels.{path.stem}.{name}" for path in KERNELS for name in _names(path)}
    assert set(compiled) == written  # a new one is called below, too
    needed = {name: kernel.metadata.shared for name, kernel in compiled.items()}
    assert {name: size for name, size in needed.items() if size > MEMORY[capability] * 1024} == {}


@pytest.mark.parametrize(
    ("capability", "samples", "stages"), [(90, 64, 3), (90, 128, 2), (89, 64, 2), (89, 16, 3), (80, 128, 2)]
)
def test_dense_update__has_as_many_loads_under_way_as_a_gpu_holds(
    capability: int, samples: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a formula, batches above 64 were said to fit an H200, and batches of 64 a GPU of 99 KiB: runs would stop."""
    pretend(capability, monkeypatch)
    assert dense_stages(samples) == stages


def test_dense_update__is_left_out_where_it_cannot_be_compiled_or_held(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(90, monkeypatch)
    from triton.runtime.jit import JITFunction

    monkeypatch.setitem(MEMORY, 90, 8)
    assert dense_stages(128) is None

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(JITFunction, "run", fail)
    assert dense_stages(64) is None


def dense_stages(samples: int) -> int | None:
    """For CNN-B's dense layer, its slopes as a product has them."""
    from fedblur.accel.kernels import triton_dense

    return triton_dense.stages(_half(2, samples, 128).transpose(1, 2), _half(2, samples, 7744), operators.TILE)


def call_convolutions(shapes: list[tuple[Any, ...]]) -> None:
    """Every kernel once or more."""
    from fedblur.accel.kernels import triton_conv, triton_conv_pool

    for g in (Geometry(*shape) for shape in shapes):
        x, w = (
            _half(g.clients, g.batch, g.height, g.width, g.channels),
            _half(g.clients, g.outputs, *g.kernel, g.channels),
        )
        gy, bias = _half(g.clients, g.batch, *g.out_size, g.outputs), _half(g.clients, g.outputs)
        triton_conv.forward(x, w, bias, g)
        triton_conv.input_grad(gy, w, g)
        triton_conv.weight_grad(gy, x, g)
        if g.poolable:
            y, where = triton_conv_pool.forward(x, w, bias, g, True)
            triton_conv_pool.input_grad(y, where, w, g)
            triton_conv_pool.weight_grad(y, where, x, g)
    dropout = triton_conv.Dropout(torch.zeros(2, dtype=torch.int32), threshold(0.5), 2.0)
    triton_conv.forward(x, w, None, g, dropout)


def call_others() -> None:
    from fedblur.accel.kernels import triton_common, triton_dense

    y = _half(2048, 64, 5, 1, 1)  # the largest block of clients that an engine makes
    triton_common.relu_dropout_grad(y, y, 2.0)
    slope, delta = _half(2, 64, 128).transpose(1, 2), torch.empty(2, 128, 7744)
    triton_dense.update(slope, _half(2, 64, 7744), delta, torch.empty(2), delta[0], operators.TILE)


def _names(path: Path) -> list[str]:
    return re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE)


def _half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)
