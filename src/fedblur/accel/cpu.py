"""Threads and memory of a CPU: as many workers as there are cores, and freed memory that is kept for the next step.

**Threads.** On small tensors, threads that compute side by side with one intra-op thread each beat threads in step.

**Memory.** glibc returns blocks of some megabytes to the system as soon as they are freed. Then every activation and
gradient of a step is mapped and zeroed again, which takes 7 to 12 % of a CNN's local step. A thread's own heap is
returned whatever the thresholds are, so all threads share one heap. Other allocators and systems are left alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_LARGEST = 2**30  # blocks up to this size come from the heap


def usable_cores() -> int:
    """Return how many cores this process may use, at most torch's own limit (OMP_NUM_THREADS, set_num_threads)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, torch.get_num_threads()))


@contextmanager
def single_threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads with one intra-op thread each. torch's setting, which threads share, is restored."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "fedblur", initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def keep_freed_memory() -> bool:
    """Configure the allocator, for the whole process and for good. Return False where that is not possible."""
    mallopt = _from_libc("mallopt")
    settings = {_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: 2**31 - 1, _ARENA_MAX: 1}
    return mallopt is not None and all(mallopt(name, value) for name, value in settings.items())


def return_freed_memory() -> None:
    """Return free memory to the system now and then: kept memory fragments, and a long round would need more of it."""
    trim = _from_libc("malloc_trim")
    if trim is not None:
        trim(0)


def _from_libc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, or None where it has none of that name (musl) or this is not Linux."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
