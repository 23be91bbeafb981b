"""A table's results made up for tests, in the form of real ones: every cell, without training anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedblur.core.callbacks import Row
from fedblur.experiments.result_store import Results, make_result
from fedblur.experiments.table import write_plan
from fedblur.experiments.table_spec import Cell, read_spec
from fedblur.privacy.claim import to_json, why_not_private
from tests.worlds import record_of_a_run

SPEC = """
title = "Budgets & 100 % of it_all"
[base]
rounds = 2
clients = 40
[axes]
epsilon = [2, 8]
seed = [0, 1, 2]
[[rows]]
label = "plain"
[[rows]]
label = "BLUR_50 %"
method = ["blur"]
[[rows]]
label = "without noise"
epsilon = inf
axes = { seed = [0, 1, 2] }
"""


def figure(cell: Cell) -> float:
    """An accuracy that grows with ε; BLUR is 0.02 better, with a little noise of its own."""
    seed = cell.config.seed or 0
    better = 0.02 + 0.001 * seed if "BLUR" in cell.label else 0.0
    return (
        0.5 + (0.3 if cell.config.epsilon == float("inf") else 0.02 * (cell.config.epsilon or 0)) + 0.01 * seed + better
    )


def invent(folder: Path, of: Callable[[Cell], dict[str, float]] | None = None, local: float = 0.5) -> Path:
    """Write OUT with a result for each cell; `of`: the metrics of a cell. `local`: what is local only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.toml").write_text(SPEC)
    spec = read_spec(folder / "spec.toml")
    store = Results(folder / "out/results")
    write_plan(spec, folder / "out", store.folder)
    for cell in spec.cells:
        figures = of(cell) if of else {"accuracy": figure(cell)}
        record = record_of_a_run(accuracy=figures.get("accuracy", 0.0), clipped_share=local)
        epsilon = cell.config.epsilon or 0.0
        noise = 0.0 if epsilon == float("inf") else 1.0
        claim = replace(
            record.privacy, epsilon=epsilon, noise_multiplier=noise,
            warning=why_not_private(cell.config.seed is None, noise, 0.1),
        )  # fmt: skip
        whole = list(figures) == ["accuracy"]
        record = replace(
            record, privacy=claim, seconds=local, accuracy=figures.get("accuracy"),
            metric=None if whole else next(iter(figures)), figures=None if whole else figures,
        )  # fmt: skip
        rows: list[Row] = [
            {"round": t, "epsilon": epsilon * t / 2, "loss": 1.0 / t, "seconds": local,
             "accuracy": figures.get("accuracy"), "figures": figures,
             "local_only": {"clipped_share": local, "cohort": 9, "norm_quantiles": [local] * 5, "clip_norm": local}}
            for t in (1, 2)
        ]  # fmt: skip
        about = {
            "table": cell.table, "title": cell.title, "position": cell.position, "cell": cell.name, "label": cell.label,
            "axes": cell.axes, "axis_order": list(cell.axes), "machine": "cpu", "hardware": "invented",
        }  # fmt: skip
        store.write(cell.key, make_result(about, cell.config, to_json(record), rows))
    return folder / "out"
