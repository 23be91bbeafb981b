"""One system as a process that waits for rounds. It stays alive for a workload, so that rounds can be interleaved."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.environments import BENCHMARKS, Unavailable, last_line, python_of


class System:
    """A running system. Every failure is an `Unavailable` that says why."""

    def __init__(
        self, name: str, inputs: Path, folder: Path, threads: int | None, tree: Path = BENCHMARKS.parent
    ) -> None:
        """Start a system, which writes into `folder`; `tree` is the checkout whose code it runs."""
        self.name = name
        self.sum_path, self.log_path = folder / f"{name}.npy", folder / f"{name}.log"
        paths = [str(tree / "benchmarks"), str(tree / "src"), os.environ.get("PYTHONPATH", "")]
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        limit = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)} if threads else {}
        python_path = os.pathsep.join(filter(None, paths))
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [str(python_of(name)), "-m", f"peers.{name}", str(inputs), str(self.sum_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env={**os.environ, **quiet, **limit, "FLWR_HOME": str(folder), "PYTHONPATH": python_path},
                start_new_session=True,
            )
        self.greeting = self._answer(240)

    def round(self, seconds: float = 240) -> tuple[float, NDArray[np.float64]]:
        """Run a round: how long it took by the system's own clock, and its clipped sum."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"round\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has died; the answer, or its absence, says why
        answer = self._answer(seconds)
        return float(answer["seconds"]), np.load(self.sum_path).astype(np.float64)

    def close(self) -> None:
        """End the process and what it has started."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        with contextlib.suppress(ProcessLookupError):  # Ray's workers, for instance
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        line, until = b"", time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, until - time.monotonic())):
                    self.close()
                    raise Unavailable(f"{self.name} did not answer within {seconds:.0f} s")
                part = os.read(self.process.stdout.fileno(), 65536)
                if not part:
                    self.close()
                    raise Unavailable(f"{self.name} stopped: {last_line(self.log_path.read_text(errors='replace'))}")
                line += part
        answer: dict[str, Any] = json.loads(line)
        return answer
