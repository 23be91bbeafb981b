"""Results made up for tests, in the form of real ones: every cell of every table, with accuracies by a function."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from fedblur.core.config import canonical, to_dict
from fedblur.experiments.result_store import Results
from fedblur.experiments.table_spec import Cell, read_spec

ROOT = Path(__file__).resolve().parents[2]
VOTES = {"labels_equal_plurality": 0.9, "teacher_accuracy_quartiles": [0.2, 0.3, 0.4]}
CHENG = ROOT / "papers" / "cheng2022"


def copy_of(folder: Path, into: Path) -> Path:
    """Tables and page without results."""
    shutil.copytree(folder, into, ignore=shutil.ignore_patterns("results", "figures", "README.md"))
    return into


def invent(folder: Path, accuracy: Callable[[Cell], float], norm: Callable[[Cell], float] = lambda cell: 1.0) -> int:
    """Write a result for every cell of the folder's tables (None: no result); returns how many."""
    store = Results(folder / "results")
    for path in sorted(folder.glob("*.toml")):
        for cell in read_spec(path).cells:
            if (value := accuracy(cell)) is not None:
                store.write(cell.key, result_of(cell, value, norm(cell)))
    return len(store.found)


def result_of(cell: Cell, accuracy: float, norm: float) -> dict:
    """The keys that a page reads."""
    config, voting = cell.config, cell.config.voting is not None
    clip = config.clip_norm
    quantiles = [q * norm * clip for q in (0.5, 0.8, 1.0, 1.2, 2.0)]
    norms = [{"round": t, "norm_quantiles": quantiles, "clip_norm": clip, "kappa": 0.5} for t in (1, config.rounds)]
    return {
        "table": cell.table,
        "cell": cell.name,
        "label": cell.label,
        "axes": cell.axes,
        "machine": "vectorised on cuda, bf16",
        "hardware": "an invented GPU",
        "settings": cell.key,
        "date": "2026-01-01",
        "status": "complete",
        "rounds": 1 if voting else config.rounds,
        "accuracy": accuracy,
        "evaluated_on": config.evaluate,
        "parameters": 1_000_000,
        "privacy": {"signal_to_noise": None if voting else 2.0 + (config.epsilon or 0), "expected_cohort": 25.0},
        "local_only": {"clipped_share": None, **VOTES} if voting else {"clipped_share": 0.9},
        "seconds": 60.0,
        "curve": [[1, 0.01], [config.rounds, accuracy]],
        "norms": [] if voting else norms,
        "config": json.loads(canonical(to_dict(config))),
    }
