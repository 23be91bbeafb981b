"""GPUs that are not here: Triton compiles for them all the same, and says what a kernel would need there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

MEMORY = {80: 163, 89: 99, 90: 227, 100: 227}  # KiB that a program may have: A100; RTX 4090, L4; H100, H200; B200


class Absent:
    """What Triton asks a driver for before it compiles."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": MEMORY[capability] * 1024})

    def get_current_device(self) -> int:
        return self.target.arch  # a device of its own for each, so that none is compiled for another

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def pretend(capability: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """That there is such a GPU. Kernels are compiled for it and not launched; returned by name as they are called."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from fedblur.accel.kernels import triton_dense

    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        assert max(grid[1:], default=0) < 2**16, f"{self.fn.__name__}: a GPU takes 65,535 programs in these dimensions"
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if not warmup:
            compiled[f"{self.fn.__module__}.{self.fn.__name__}"] = kernel
        return kernel

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(triton_dense, "_clients_each", lambda delta, tiles: 2)
    monkeypatch.setattr(driver, "_active", Absent(capability))
    triton_dense._stages.cache_clear()
    return compiled
