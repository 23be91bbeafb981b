"""A model of the caller's own: measured as its users will call it, and never trained in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import fedblur
from fedblur.core.config import LocalTraining
from fedblur.learning.module_function import initial_vector

SHORT = fedblur.Config(
    dataset="digits", clients=40, rounds=2, sample_rate=0.5, local=LocalTraining(steps=2, batch_size=4), seed=0
)


class TwoFaced(nn.Module):
    """Right about nothing in training mode: the same label for all. In evaluation mode it uses its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits + 1e6 * torch.eye(10)[0] if self.training else logits


@pytest.mark.parametrize("engine", ["vectorised", "sequential"])
def test_accuracy__is_measured_in_evaluation_mode(engine: Literal["vectorised", "sequential"], tmp_path: Path) -> None:
    module = TwoFaced()
    run = fedblur.train(SHORT, module=module, out=tmp_path / "run", machine=fedblur.Machine(engine=engine))
    test = fedblur.load_federation("digits", clients=40).test
    guesses = run.module(test.x).argmax(1)
    assert run.accuracy == float((guesses == test.y).double().mean())
    assert len(guesses.unique()) > 1  # else training mode would be as good
    assert run.rounds[-1]["local_only"]["class_accuracy"].count(0.0) < 9


def test_run__shows_nothing_that_is_local_only_in_a_notebook(tmp_path: Path) -> None:
    run = fedblur.train(SHORT, out=tmp_path / "run")
    shown = repr(run)
    assert shown.startswith(f"Run({str(run.path)!r}, accuracy={run.accuracy:.4g}, epsilon=")
    assert "NOT PRIVATE: seeded" in shown
    assert "local_only" not in shown
    assert len(shown) < 100 + len(str(run.path))


def test_module__is_trained_as_a_copy(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)).eval()
    before = initial_vector(module)
    runs = [fedblur.train(SHORT, module=module, out=tmp_path / str(i)) for i in range(2)]
    assert torch.equal(initial_vector(module), before)
    assert not module.training
    assert runs[0].module is not module
    assert not torch.equal(initial_vector(runs[0].module), before)
    assert (runs[0].path / "model.safetensors").read_bytes() == (runs[1].path / "model.safetensors").read_bytes()


def test_starting_weights__that_the_caller_gave_are_outside_the_claim(tmp_path: Path) -> None:
    given = fedblur.train(SHORT, module=TwoFaced(), out=tmp_path / "given")
    named = fedblur.train(SHORT, out=tmp_path / "named")
    lines = [json.loads((run.path / "statement.json").read_text())["not_protected"] for run in (given, named)]
    assert ["starting weights" in "".join(some) for some in lines] == [True, False]
    assert "TwoFaced" in (given.path / "statement.md").read_text()
