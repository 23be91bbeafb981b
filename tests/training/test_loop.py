"""The loop: run folders, resume, what a result states, own data and models."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedblur
from fedblur.core.errors import RunError, TimeIsUp
from fedblur.privacy.claim import NOISELESS, SEEDED

SHORT = fedblur.Config(rounds=6, seed=0, checkpoint_every=2, eval_every=2, epsilon=4.0)


def own_world(**changes):
    rng = np.random.default_rng(0)
    centres = 2 * rng.normal(size=(3, 8))
    y = rng.integers(0, 3, 300)
    x = (centres[y] + rng.normal(size=(300, 8))).astype(np.float32)
    return fedblur.federation_from_arrays(x[:240], y[:240], np.arange(240) // 4, x[240:], y[240:], **changes)


def test_train__writes_a_whole_run_folder(tmp_path: Path) -> None:
    run = fedblur.train(SHORT, out=tmp_path / "run")
    names = {p.name for p in run.path.iterdir()}
    assert names == {
        "config.json",
        "rounds.jsonl",
        "ledger.jsonl",
        "checkpoints",
        "engine.json",
        "model.safetensors",
        "summary.json",
        "statement.md",
        "statement.html",
        "statement.json",
    }
    rows = [json.loads(line) for line in (run.path / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["round"] for row in rows if row["accuracy"] is not None] == [1, 2, 4, 6]
    assert rows[-1]["accuracy"] == run.accuracy
    weights = load_file(run.path / "model.safetensors")
    assert all(torch.equal(weights[name], p) for name, p in run.module.state_dict().items())
    assert rows[-1]["epsilon"] == run.epsilon <= 4.0


def test_invariant_7__diagnostics_are_marked_local_only(tmp_path: Path) -> None:
    run = fedblur.train(SHORT, out=tmp_path / "run")
    assert {*run.rounds[0]} == {"round", "epsilon", "accuracy", "loss", "seconds", "local_only"}
    private = {"norm_quantiles", "clipped_share", "cohort", "kappa", "refused", "beta", "alpha_bar"}
    assert private <= {*run.rounds[0]["local_only"]}
    statement = json.dumps(run.summary["privacy"])
    assert not any(f'"{name}"' in statement for name in private)


def test_invariant_9__a_seeded_run_says_that_it_is_not_private(tmp_path: Path) -> None:
    assert fedblur.train(SHORT, out=tmp_path / "seeded").summary["privacy"]["warning"] == SEEDED
    private = fedblur.Config(rounds=2, epsilon=4.0)
    assert fedblur.train(private, out=tmp_path / "private").summary["privacy"]["warning"] is None
    silent = fedblur.Config(rounds=2, epsilon=math.inf)
    assert fedblur.train(silent, out=tmp_path / "silent").summary["privacy"]["warning"] == NOISELESS


def test_invariant_10__every_result_states_its_guarantee(tmp_path: Path) -> None:
    privacy = fedblur.train(SHORT, out=tmp_path / "run").summary["privacy"]
    for key in (
        "epsilon",
        "delta",
        "accountant",
        "adjacency",
        "sampling",
        "trust_model",
        "tuning",
        "unit",
        "releases",
    ):
        assert privacy[key] not in (None, ""), key
    assert privacy["adjacency"] == "add or remove one client"
    assert privacy["releases"] == 6


def test_resume__goes_on_bit_identically(tmp_path: Path) -> None:
    config = fedblur.Config(
        rounds=7,
        seed=3,
        checkpoint_every=2,
        epsilon=4.0,
        model="mlp",
        method="blur+lus",
        averaging="ema",
        server="adam",
    )
    whole = fedblur.train(config, out=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop_after_5(row) -> None:
        if row["round"] == 5:
            raise Stop

    with pytest.raises(Stop):
        fedblur.train(config, out=tmp_path / "broken", watch=stop_after_5)
    assert len((tmp_path / "broken" / "rounds.jsonl").read_text().splitlines()) == 5
    resumed = fedblur.resume(tmp_path / "broken")
    assert (resumed.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()
    assert [row["round"] for row in resumed.rounds] == [*range(1, 8)]
    assert [row["local_only"] for row in resumed.rounds] == [row["local_only"] for row in whole.rounds]
    assert resumed.epsilon == whole.epsilon


def test_resume__of_a_private_run_pays_for_repeated_rounds(tmp_path: Path) -> None:
    config = fedblur.Config(rounds=6, checkpoint_every=4, epsilon=4.0)

    def stop_after_3(row) -> None:
        if row["round"] == 3:
            raise KeyError

    with pytest.raises(KeyError):
        fedblur.train(config, out=tmp_path / "run", watch=stop_after_3)
    with pytest.raises(fedblur.FedBlurError, match="the budget is spent: 6 releases"):
        fedblur.resume(tmp_path / "run")  # 3 lost rounds are paid for: 3 more fit
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped after 3 of 6 rounds"
    assert summary["privacy"]["epsilon"] <= 4.0
    assert summary["privacy"]["releases"] == 6


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, TimeIsUp])
def test_interrupt__saves_what_was_paid_for(stopped: type[BaseException], tmp_path: Path) -> None:
    def stop(row) -> None:
        if row["round"] == 3:
            raise stopped

    with pytest.raises(stopped):
        fedblur.train(SHORT, out=tmp_path / "run", watch=stop)
    assert (tmp_path / "run" / "checkpoints" / "round-000003.safetensors").exists()
    assert fedblur.resume(tmp_path / "run").summary["status"] == "complete"


def test_train__own_data_and_own_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    config = fedblur.Config(rounds=20, sample_rate=0.5, epsilon=8.0, clip_norm=0.5, seed=0)
    run = fedblur.train(config, out=tmp_path / "run", federation=own_world(), module=model)
    assert run.accuracy > 0.8
    assert run.module is not model
    with pytest.raises(RunError, match="with its own data"):
        fedblur.resume(run.path)
    again = fedblur.resume(run.path, federation=own_world(), module=nn.Linear(8, 3))
    assert again.accuracy == run.accuracy


def test_evaluate__validation_never_looks_at_test_data(tmp_path: Path) -> None:
    federation = own_world(validation_share=0.2)
    poisoned = type(federation)(
        federation.name, federation.train, federation.validation, federation.validation_clients,
        type(federation.test)(torch.full_like(federation.test.x, math.nan), federation.test.y),
    )  # fmt: skip
    config = fedblur.Config(rounds=2, evaluate="validation", seed=0, model="logistic")
    run = fedblur.train(config, out=tmp_path / "run", federation=poisoned)
    assert run.summary["evaluated_on"] == "validation"
    assert math.isfinite(run.summary["loss"])


def test_train__frozen_parameters_do_not_move_and_are_not_sent(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    run = fedblur.train(fedblur.Config(rounds=2, seed=0), out=tmp_path / "run", federation=own_world(), module=model)
    assert torch.equal(model[0].weight, before)
    assert run.summary["parameters"] == 6 * 3 + 3


@pytest.mark.parametrize(
    "sampling", [{"sampling": "fixed", "accountant": "rdp"}, {"sampling": "full", "sample_rate": 1.0}]
)
def test_train__other_samplings_have_their_own_accounting(tmp_path: Path, sampling) -> None:
    config = fedblur.Config(rounds=3, seed=0, epsilon=4.0, **sampling)
    run = fedblur.train(config, out=tmp_path / "run")
    assert run.epsilon <= 4.0
    expected = "replace one client" if sampling["sampling"] == "fixed" else "add or remove one client"
    assert run.summary["privacy"]["adjacency"] == expected


def test_engines__vectorised_and_sequential_give_the_same_model(tmp_path: Path) -> None:
    config = fedblur.Config(rounds=4, seed=0, model="cnn", method="blur+lus", sample_rate=0.02)
    ends = []
    for name in ("vectorised", "sequential"):
        run = fedblur.train(config, out=tmp_path / name, machine=fedblur.Machine(engine=name))
        ends.append(torch.cat([p.detach().flatten() for p in run.module.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-5)
