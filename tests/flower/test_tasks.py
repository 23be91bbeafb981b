"""Regression, multi-label, next token and a loss of one's own over Flower: the simulator's model. In one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedblur
from fedblur.core.config import from_dict, read_toml
from fedblur.flower.settings import Deployment
from tests.flower.world import SECURE, LoopGrid, _toml, federated, weights
from tests.task_worlds import CLIENTS, SHARED, TASK_WORLDS, task_world


def deployed(name: str, folder: Path, **changes: object) -> Deployment:
    """A task's deployment in a folder."""
    world = task_world(name)
    table = SHARED | world.settings | {"clients": CLIENTS} | changes
    path = folder / "fedblur.toml"
    path.write_text("\n".join(f"{key} = {_toml(value)}" for key, value in table.items()) + "\n")
    return Deployment(
        path, world.shape, world.classes, lambda node: world.part(int(node["partition-id"])),
        lambda: world.part(CLIENTS), world.module, world.loss,
    )  # fmt: skip


@pytest.mark.parametrize("name", TASK_WORLDS)
@pytest.mark.parametrize("trust", ["central", "secure-sum"])
def test_flower__gives_the_simulators_model_of_every_task(tmp_path: Path, name: str, trust: str) -> None:
    mechanism = "gaussian" if trust == "central" else SECURE
    task = deployed(name, tmp_path, mechanism=mechanism, sample_rate=1.0, rounds=2)
    run = federated(task, LoopGrid(task, CLIENTS, trust), tmp_path / "run", trust)
    plain = fedblur.train(from_dict(read_toml(task.config)), out=tmp_path / "plain", **task_world(name).given())
    assert float((weights(run) - weights(plain)).abs().max()) < 1e-6
    assert run.metrics == pytest.approx(plain.metrics, rel=1e-5)
    assert "accuracy" not in (tmp_path / "run/statement.md").read_text()


def test_flower__a_run_with_a_loss_of_ones_own_is_resumed(tmp_path: Path) -> None:
    task = deployed("own", tmp_path, rounds=2)
    grid = LoopGrid(task, CLIENTS, "central")
    first = federated(task, grid, tmp_path / "run", "central")
    again = federated(task, grid, tmp_path / "run", "central")
    assert torch.equal(weights(first), weights(again))
