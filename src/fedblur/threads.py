"""Threads that compute side by side, each with one intra-op thread: on small tensors that beats threads in step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


def usable_cores() -> int:
    """Cores that this process may use, as far as torch is allowed to (OMP_NUM_THREADS, set_num_threads)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, torch.get_num_threads()))


@contextmanager
def single_threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of such threads. The caller's own setting, which torch shares with new threads, is kept."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "fedblur", initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
