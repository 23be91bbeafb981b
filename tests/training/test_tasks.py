"""Runs of other tasks than classification: what they report, what they refuse, functions from Python, resuming."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedblur
from fedblur.core.config import config_hash, from_dict, to_dict
from fedblur.core.errors import ConfigError, DataError, ModelError, RunError
from fedblur.data.federation import federation_from_arrays
from fedblur.training.run_folder import RunFolder
from tests.task_worlds import CLIENTS, EACH, SHARED, log_cosh, task_world

OWNERS = torch.arange(CLIENTS * EACH) // EACH


def config(name: str, **changes: Any) -> fedblur.Config:
    return from_dict({**SHARED, **task_world(name).settings, **changes})


def run_of(name: str, out: Path, **changes: Any) -> fedblur.Run:
    return fedblur.train(config(name, **changes), out=out, **task_world(name).given())


def test_run__carries_its_headline_through_rounds_summary_and_statement(tmp_path: Path) -> None:
    run = run_of("regression", tmp_path / "run")
    assert list(run.metrics) == ["rmse", "mae"]
    assert run.record.headline == ("rmse", run.metrics["rmse"])
    assert RunFolder(run.path).read_summary().headline == run.record.headline
    row = run.rounds[-1]
    assert row["figures"] == run.metrics
    assert "accuracy" not in row
    assert row["local_only"]["client_metric"] == "rmse"
    assert len(row["local_only"]["client_figures"]) == CLIENTS
    texts = [path.read_text().lower() for path in run.path.iterdir() if path.suffix in (".md", ".json", ".jsonl")]
    assert len(texts) >= 5
    assert not any("accuracy" in text for text in texts)
    assert f"Its RMSE is {run.metrics['rmse']:.4g} on test data" in (run.path / "statement.md").read_text()
    with pytest.raises(RunError, match=r"measured rmse, mae, not accuracy: read run\.metrics"):
        _ = run.accuracy


def test_run__of_a_classifier_reports_as_before_and_with_more_metrics_also_figures(tmp_path: Path) -> None:
    settings = {"rounds": 1, "seed": 0, "epsilon": 8.0}
    plain = fedblur.train(fedblur.Config(**settings), out=tmp_path / "plain")
    more = fedblur.train(fedblur.Config(**settings, metrics=["f1", "accuracy"]), out=tmp_path / "more")
    assert list(plain.rounds[0]) == ["round", "epsilon", "accuracy", "loss", "seconds", "local_only"]
    assert not {"task", "metric", "figures"} & plain.summary.keys()
    assert plain.metrics == {"accuracy": plain.accuracy}
    assert more.accuracy == plain.accuracy
    assert list(more.rounds[0]["figures"]) == ["f1", "accuracy"]
    assert RunFolder(more.path).read_summary().headline[0] == "f1"


def test_summary__whose_metric_is_not_there_is_an_error_in_one_line(tmp_path: Path) -> None:
    run = run_of("regression", tmp_path / "run", rounds=1)
    table = json.loads((run.path / "summary.json").read_text())
    for change in ({"metric": "f1"}, {"metric": None}, {"figures": None}):
        (run.path / "summary.json").write_text(json.dumps(table | change))
        with pytest.raises(RunError, match=r"summary\.json is not what fedblur writes"):
            RunFolder(run.path).stored_summary()


def test_hash__of_configurations_without_a_task_is_as_it_was() -> None:
    plain = config_hash(fedblur.Config())
    assert plain == config_hash(fedblur.Config(task="classification", metrics=(), local=fedblur.LocalTraining()))
    assert config_hash(from_dict({**to_dict(fedblur.Config()), "task": None} | {"task": "classification"})) == plain
    changed = [
        fedblur.Config(task="ranking"),
        fedblur.Config(metrics=["f1"]),
        fedblur.Config(local=fedblur.LocalTraining(optimizer="adam")),
        fedblur.Config(local=fedblur.LocalTraining(optimizer="adam", betas=(0.8, 0.9))),
    ]
    assert len({plain, *map(config_hash, changed)}) == 5


def test_own_loss__is_resumed_with_its_function_alone(tmp_path: Path) -> None:
    """Stopped after two of three rounds by the user's own function; the end is that of an undisturbed run."""
    whole, calls = run_of("own", tmp_path / "whole", checkpoint_every=1), []

    def stop(model: nn.Module) -> dict[str, float]:
        calls.append(model)
        if len(calls) == 2:
            raise ValueError("enough")
        return {"norm": 1.0, "nothing": math.nan}

    given = task_world("own").given()
    with pytest.raises(RunError, match=r"on_evaluate failed: ValueError: enough; fix it and resume"):
        fedblur.train(config("own", checkpoint_every=1), out=tmp_path / "cut", on_evaluate=stop, **given)
    rows = RunFolder(tmp_path / "cut").read_rounds()
    assert [row["round"] for row in rows] == [1, 2]
    assert list(rows[0]["figures"]) == ["loss", "norm"]
    data = given["federation"]
    with pytest.raises(RunError, match=r"started from Python with its own loss \(tests\.task_worlds:log_cosh\)"):
        fedblur.resume(tmp_path / "cut", federation=data)
    again = fedblur.resume(tmp_path / "cut", federation=data, loss=log_cosh, tell=lambda line: None)
    assert all(torch.equal(*pair) for pair in zip(whole.module.parameters(), again.module.parameters(), strict=True))
    assert again.rounds[-1]["figures"]["loss"] == whole.rounds[-1]["figures"]["loss"]
    assert {part.name for part in again.record.privacy.own_parts} == {"log_cosh"}


def test_on_evaluate__gets_a_copy_of_the_model_whenever_it_is_evaluated(tmp_path: Path) -> None:
    seen = []

    def look(model: nn.Module) -> dict[str, float]:
        assert not model.training
        seen.append(float(sum(weight.abs().sum() for weight in model.parameters())))
        for weight in model.parameters():
            weight.zero_()
        return {"size": seen[-1]}

    given = task_world("regression").given()
    run = fedblur.train(config("regression"), out=tmp_path / "a", on_evaluate=look, **given)
    plain = fedblur.train(config("regression"), out=tmp_path / "b", **given)
    assert torch.equal(*(torch.cat([w.flatten() for w in r.module.parameters()]) for r in (run, plain)))
    assert [row["figures"]["size"] for row in run.rounds] == seen
    assert run.metrics["size"] == seen[-1]
    for wrong, message in (({"rmse": 1.0}, "is a metric of this run"), ([1.0], "must be figures by name")):
        with pytest.raises(RunError, match=message):
            fedblur.train(
                config("regression"),
                out=tmp_path / f"{len(seen)}{type(wrong)}",
                on_evaluate=lambda m, w=wrong: w,
                **given,
            )


def scalar(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square().mean()


@pytest.mark.parametrize(
    ("changes", "loss", "message"),
    [
        ({}, scalar, r"loss tests\.training\.test_tasks:scalar returns shape \[\] for 2 samples; .* per sample"),
        ({}, lambda o, t: o - t[:1].nope, "cannot compare outputs .*nope"),
        ({}, lambda o, t: "nothing", "returns a str for 2 samples"),
        ({"task": "regression"}, scalar, "is given, but the task is 'regression'; keep one"),
        ({"task": "own"}, None, "task 'own' needs its loss"),
        ({"task": "regression", "method": "gce"}, None, "method 'gce' reads the logits of classes"),
        ({"task": "regression", "method": "balance"}, None, "method 'balance' reads the logits of classes"),
        ({"task": "regression", "method": "ae-dpfl"}, None, "method 'ae-dpfl' votes for classes"),
        ({"task": "regression", "method": "augment", "test_views": 2}, None, "test_views=2 averages probabilities"),
        ({"task": "regression", "metrics": ["accuracy"]}, None, "metric 'accuracy' is about classes"),
        ({"task": "regression", "metrics": ["f2"]}, None, "metric 'f2' is unknown: did you mean 'f1'"),
        ({"task": "regresion"}, None, "task 'regresion' is unknown: did you mean 'regression'"),
        ({"task": "multilabel"}, None, r"needs \[samples, labels\] of 0 and 1"),
        ({"task": "binary"}, None, "targets of task 'binary' are 0 or 1"),
        ({"task": "ranking"}, None, "needs the number of one item"),
        ({"task": "next-token"}, None, "needs whole numbers"),
        ({"task": "classification"}, None, "classification needs one whole number per sample"),
        ({"local": {"optimizer": "adam", "momentum": 0.5}}, None, "local.momentum=0.5 is of SGD"),
        ({"local": {"betas": [0.8, 0.9]}}, None, "are of Adam"),
        ({"local": {"optimizer": "adam", "betas": [0.8, 1.0]}}, None, "local.betas="),
    ],
)
def test_set_up__refuses_what_does_not_fit_before_anything_is_spent(
    tmp_path: Path, changes: dict[str, Any], loss: Any, message: str
) -> None:
    given = task_world("regression").given() | {"loss": loss}
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        fedblur.train(from_dict({**SHARED, "model": "mlp", **changes}), out=tmp_path / "run", **given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run/ledger.jsonl").exists()


class Lookup(nn.Module):
    """An embedding: it reads whole numbers and nothing else."""

    def __init__(self, tokens: int = 12) -> None:
        super().__init__()
        self.vectors, self.head = nn.Embedding(tokens, 4), nn.Linear(4, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.dtype == torch.int64
        return self.head(self.vectors(tokens))


def test_tokens__reach_a_model_that_reads_them_as_whole_numbers_and_any_other_as_floats(tmp_path: Path) -> None:
    world = task_world("next-token")
    cut, tokens, y = CLIENTS * EACH, world.x["tokens"], world.y
    data = federation_from_arrays(tokens[:cut], y[:cut], OWNERS, tokens[cut:], y[cut:], classes=12, public=True)
    run = fedblur.train(config("next-token", rounds=1), out=tmp_path / "tokens", federation=data, module=Lookup())
    assert run.metrics["perplexity"] > 1
    with pytest.raises(DataError, match="samples hold token 11, which the model cannot read"):
        fedblur.train(config("next-token"), out=tmp_path / "few", federation=data, module=Lookup(11))
    numbers = federation_from_arrays(
        tokens[:cut], y[:cut, 0], OWNERS, tokens[cut:].int(), y[cut:, 0], classes=12, public=True
    )
    plain = from_dict({**SHARED, "rounds": 1, "model": "logistic"})
    floats = replace(
        numbers,
        train=replace(numbers.train, x=numbers.train.x.float()),
        test=replace(numbers.test, x=numbers.test.x.float()),
    )
    runs = [fedblur.train(plain, out=tmp_path / f"{i}", federation=each) for i, each in enumerate((numbers, floats))]
    assert torch.equal(runs[0].module.head.weight, runs[1].module.head.weight)


def test_inputs__that_the_model_does_not_name_are_refused(tmp_path: Path) -> None:
    world = task_world("next-token")
    given = world.given()
    with pytest.raises(ModelError, match="the model cannot read the inputs tokens, mask: .*; name them"):
        fedblur.train(config("next-token"), out=tmp_path / "a", federation=given["federation"], module=Lookup())
    with pytest.raises((ModelError, DataError), match="samples of one tensor|cannot read the inputs"):
        fedblur.train(config("next-token", model="mlp"), out=tmp_path / "b", federation=given["federation"])
    with pytest.raises(ModelError, match=r"has shape \(2, 12\), but the task's targets need \(2, 5, 12\)"):
        fedblur.train(config("next-token"), out=tmp_path / "c", federation=given["federation"], module=Pooled())


class Pooled(nn.Module):
    """One output for all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(12, 12)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.vectors(tokens).mean(1)
