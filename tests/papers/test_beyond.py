"""The tables beyond the paper: every file is complete, and a two-round version of the ablation runs on tiny data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedblur.data.packed import export
from fedblur.data.source import Split, Stored
from fedblur.experiments.result_store import Results
from fedblur.experiments.table import Cell, read_spec, run_cells
from fedblur.training.machine import Machine

FOLDER = Path(__file__).resolve().parents[2] / "papers" / "beyond"
TINY = [
    "rounds=2", "local.steps=2", "sample_rate=0.2", "clients=20", "validation_share=0.2", "delta=1e-5",
    "partition.samples_per_client=2", "eval_every=1",
]  # fmt: skip


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_files__every_cell_is_a_valid_configuration(path: Path) -> None:
    assert read_spec(path).cells


def test_ablation__has_the_recipe_each_part_and_each_candidate_at_both_epsilons_with_three_seeds() -> None:
    cells = read_spec(FOLDER / "ablation.toml").cells
    labels = dict.fromkeys(cell.label for cell in cells)
    private = [label for label in labels if not label.startswith("ceiling")]
    for label in private:
        seen = {(cell.config.epsilon, cell.config.seed) for cell in cells if cell.label == label}
        assert seen == {(epsilon, seed) for epsilon in (2.0, 8.0) for seed in (0, 1, 2)}
    words = (
        "normalise", "GCE", "EMA", "last tenth", "adaptive", "BLUR", "LUS", "SAM", "mask", "denoising", "balance",
        "RDP", "augmentation", "momentum", "cosine", "cohorts", "network",
    )  # fmt: skip
    assert all(any(word in label for label in private) for word in words)


def test_ablation__changes_one_thing_at_a_time() -> None:
    cells = {
        cell.label: cell for cell in reversed(read_spec(FOLDER / "ablation.toml").cells) if cell.config.epsilon == 2
    }
    whole = cells["best recipe"].config
    assert cells["with augmentation"].config.model == whole.model
    assert cells["with BLUR"].config.server == whole.server
    assert cells["without momentum"].config.method == whole.method
    steady = cells["without a schedule"].config.server
    assert (steady.part_name, steady.schedule, steady.momentum) == ("momentum", "constant", 0.9)
    bent = cells["a cosine instead of a line"].config.server
    assert bent == replace(whole.server, schedule="cosine")


def test_recipe_table__compares_on_every_data_set() -> None:
    cells = read_spec(FOLDER / "recipe.toml").cells
    for data in ("EMNIST", "FEMNIST", "MNIST"):
        for method in ("best recipe", "CNN, DP-FedAvg", "CNN, BLUR + LUS"):
            mine = {(c.config.epsilon, c.config.seed) for c in cells if c.label == f"{data}: {method}"}
            assert mine == {(epsilon, seed) for epsilon in (2.0, 4.0, 6.0, 8.0) for seed in (0, 1, 2)}
    cifar = [cell for cell in cells if cell.label.startswith("CIFAR-10")]
    assert {cell.config.partition.alpha for cell in cifar} == {1.0, 0.1}
    assert {cell.config.clients for cell in cifar} == {5000}
    for label in {cell.label for cell in cifar}:
        mine = {(cell.config.epsilon, cell.config.seed) for cell in cifar if cell.label == label}
        assert mine >= {(8.0, seed) for seed in (0, 1, 2)}


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_ablation__runs_row_by_row_on_tiny_data(every: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (124, 1, 28, 28), generator=generator, dtype=torch.uint8)
    split = Split(images, torch.arange(124) % 62, None)
    export(Stored({"train": split, "test": split.take(torch.arange(8))}, 62), tmp_path / "data" / "emnist")
    spec = read_spec(FOLDER / "ablation.toml", TINY)
    first: dict[str, Cell] = {cell.label: cell for cell in reversed(spec.cells)}
    apart = ("network", "adaptive")  # large networks; a median of four clients costs more than it tells
    rows = [cell for label, cell in first.items() if not any(word in label for word in apart)][::every]
    results = Results(tmp_path / "results")
    machine = Machine(device="cpu", data_dir=tmp_path / "data")
    assert run_cells(rows, results, tmp_path / "cells", machine) == []
    assert all(0 <= results.found[cell.key]["accuracy"] <= 1 for cell in rows)
