"""What each rank of `test_distributed.py` runs: several configurations one after another, and what came out of them."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector

import fedblur
from fedblur.engines.distributed import rank

sys.path.insert(0, str(Path(__file__).parents[2]))  # torchrun starts this file by its path
from tests import task_worlds

SHARED = {"rounds": 4, "epsilon": 8.0, "sample_rate": 0.15, "eval_every": 2}
CASES = {
    "blur-lus": {**SHARED, "seed": 3, "method": "blur+lus"},
    "ddgauss": {**SHARED, "seed": 3, "mechanism": "ddgauss", "accountant": "rdp"},
    "ddgauss-shares": {**SHARED, "seed": 3, "mechanism": {"name": "ddgauss", "mode": "exact"}, "accountant": "rdp"},
    "adaptive-mask": {
        **SHARED, "seed": 3, "server": "momentum", "clipping": "adaptive", "mask": "momentum", "averaging": "ema",
    },
    "few": {**SHARED, "seed": 3, "sample_rate": 0.003},  # cohorts of none, one, two
    "whole": {"seed": 5, "rounds": 80, "method": "blur+lus", "checkpoint_every": 4},  # FLAGS of `test_distributed.py`
    "unseeded": {**SHARED, "method": "blur+lus"},
    **{name: {**task_worlds.SHARED, **task_worlds.task_world(name).settings} for name in task_worlds.TASK_WORLDS},
    "personal": {**SHARED, "seed": 3, "personal": ["*bias"], "method": "blur"},
}  # fmt: skip


def case(name: str) -> fedblur.Config:
    """A configuration by its name."""
    return fedblur.core.config.from_dict(CASES[name])


def given(name: str) -> dict[str, Any]:
    """What a case brings from Python."""
    return task_worlds.task_world(name).given() if name in task_worlds.TASK_WORLDS else {}


def main(folder: Path) -> None:
    """Run all cases on this rank; each writes its model where the test finds it."""
    for name in CASES:
        run = fedblur.train(case(name), out=folder / name, **given(name))
        torch.save(parameters_to_vector(run.module.parameters()).detach(), folder / f"{name}.{rank()}.pt")
        (folder / f"{name}.{rank()}.json").write_text(json.dumps([run.metrics, run.epsilon, len(run.rounds)]))
    lost_end(folder / "whole", folder / "resumed")
    fedblur.resume(folder / "resumed")


def lost_end(whole: Path, copy: Path) -> None:
    """Copy a run as it was before its last checkpoint; the other rank waits for it."""
    if rank() == 0:
        shutil.copytree(whole, copy)
        last = max((copy / "checkpoints").glob("round-*"))
        for path in (*copy.glob(f"checkpoints/{last.stem}*"), copy / "summary.json", copy / "model.safetensors"):
            path.unlink()
        copy.with_suffix(".ready").touch()
    while not copy.with_suffix(".ready").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
