"""Every kind of bad input: one line that names the value and the way out, exit status 2, nothing lost."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import fedblur
from fedblur.cli.app import app
from fedblur.cli.errors import end_of_a_bug
from fedblur.core.errors import DataError, DivergedError, ModelError, PrivacyError

QUICK = ["--rounds", "3", "--quiet", "--seed", "1"]


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def refuse(*words: str) -> str:
    """Run a command that must be refused; returns its message."""
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("words", "value", "way_out"),
    [
        (["--set", "sample_rat=0.2"], "sample_rat", "did you mean 'sample_rate'?"),
        (["--set", "method.blur.strenth=2", "--method", "blur"], "strenth", "did you mean 'strength'?"),
        (["--sample-rate", "1.3"], "sample_rate=1.3", "must be in (0, 1]"),
        (["--sample-rate", "0"], "sample_rate=0.0", "must be in (0, 1]"),
        (["--epsilon", "-2"], "epsilon=-2.0", "must be above 0"),
        (["--delta", "2"], "delta=2.0", "must be in (0, 1)"),
        (["--delta", "1/M"], "delta", "1/N"),
        (["--method", "lus", "--set", "method.lus.sparsity=1.2"], "sparsity=1.2", "must be in [0, 1)"),
        (["--method", "blur", "--set", "method.blur.strength=10"], "is 1", "must be below 1"),
        (["--model", "cnnn"], "'cnnn'", "did you mean 'cnn'?"),
        (["--dataset", "cifar"], "'cifar'", "did you mean 'cifar10'?"),
        (["--device", "cuda:99"], "cuda:99", "--device cpu"),
        (["--engine", "warp"], "'warp'", "vectorised"),
        (["--set", "sampling=fixed"], "fixed", "rdp"),
    ],
)
def test_bad_value__names_it_and_the_way_out(tmp_path: Path, words: list[str], value: str, way_out: str) -> None:
    message = refuse("run", *QUICK, "--out", str(tmp_path / "run"), *words)
    assert value in message
    assert way_out in message
    assert not (tmp_path / "run").exists()


def test_epsilon_that_cannot_be_reached__says_what_to_change(tmp_path: Path) -> None:
    message = refuse("run", *QUICK, "--epsilon", "1e-9", "--delta", "1e-9", "--out", str(tmp_path / "run"))
    assert "epsilon=1e-09" in message
    assert not (tmp_path / "run").exists()


def test_missing_data_set__says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDBLUR_DATA", raising=False)
    message = refuse("run", *QUICK, "--dataset", "femnist", "--out", str(tmp_path / "run"))
    assert "femnist" in message
    assert "fedblur data fetch femnist" in message
    assert "FEDBLUR_DATA" in message
    assert not (tmp_path / "run").exists()


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 5)).astype(np.float32)
    y = rng.integers(0, 3, 40)
    return {"x": x, "y": y, "owners": np.arange(40) // 4, "test_x": x[:10], "test_y": y[:10]}


def test_empty_client__is_named() -> None:
    data = arrays()
    data["owners"][data["owners"] == 4] = 5
    with pytest.raises(DataError, match="client 4"):
        fedblur.federation_from_arrays(**data)


def test_nan_in_data__is_refused() -> None:
    data = arrays()
    data["x"][3, 1] = np.nan
    with pytest.raises(DataError, match="NaN"):
        fedblur.federation_from_arrays(**data)


def test_nan_in_all_updates__stops_with_the_way_out_and_keeps_the_run(tmp_path: Path) -> None:
    words = ["--set", "local.learning_rate=1e38", "--model", "mlp", "--out", str(tmp_path / "run")]
    message = refuse("run", *QUICK, *words)
    assert "NaN or infinite" in message
    assert "lower local.learning_rate=1e+38" in message
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_nan_in_one_update__counts_as_zero_and_training_goes_on(tmp_path: Path) -> None:
    data = arrays()
    data["x"][:4] = 3e38  # client 0 overflows in training; the values themselves are finite
    federation = fedblur.federation_from_arrays(**data)
    config = fedblur.Config(rounds=2, sample_rate=1.0, sampling="full", noise_multiplier=1.0, seed=0)
    run = fedblur.train(config, out=tmp_path / "run", federation=federation)
    assert [row["local_only"]["refused"] for row in run.rounds] == [1, 1]
    assert all(torch.isfinite(p).all() for p in run.module.parameters())


def test_model_whose_output_does_not_fit__names_both(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"(?s)7.*10|10.*7"):
        fedblur.train(out=tmp_path / "run", module=nn.Sequential(nn.Flatten(), nn.Linear(64, 7)))
    assert not (tmp_path / "run").exists()


def test_model_with_batch_norm__names_the_layer_and_what_to_use(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    with pytest.raises(ModelError, match=r"replace 1 \(BatchNorm1d\) by nn.GroupNorm"):
        fedblur.train(out=tmp_path / "run", module=model)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    result = invoke(
        "run",
        "--rounds",
        "6",
        "--quiet",
        "--seed",
        "1",
        "--set",
        "checkpoint_every=2",
        "--out",
        str(tmp_path / "run"),
    )
    assert result.exit_code == 0, result.output
    return tmp_path / "run"


def test_corrupt_newest_checkpoint__falls_back_and_says_so(finished: Path) -> None:
    model = (finished / "model.safetensors").read_bytes()
    newest = max((finished / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-10])
    result = invoke("resume", str(finished), "--quiet")
    assert result.exit_code == 0, result.output
    assert f"{newest.name} is corrupt" in " ".join(result.stderr.split())
    assert (finished / "model.safetensors").read_bytes() == model  # bit-identical


def test_changed_configuration__is_refused_with_the_difference(finished: Path) -> None:
    config = json.loads((finished / "config.json").read_text())
    (finished / "config.json").write_text(json.dumps(config | {"clip_norm": 0.5}))
    assert "clip_norm: 0.1 -> 0.5" in refuse("resume", str(finished))


def test_run_into_an_existing_run__is_refused(finished: Path) -> None:
    same = ["--rounds", "6", "--seed", "1", "--set", "checkpoint_every=2", "--out", str(finished)]
    assert f"fedblur resume {finished}" in refuse("run", *same)
    assert "rounds: 6 -> 7" in refuse("run", *same, "--rounds", "7")


def test_spent_budget__refuses_the_round(tmp_path: Path) -> None:
    """A private run whose checkpoints were set back must not release more than it paid for."""
    path = tmp_path / "run"
    config = fedblur.Config(rounds=4, checkpoint_every=2, epsilon=2.0)
    fedblur.train(config, out=path)
    max((path / "checkpoints").iterdir()).unlink()  # back to round 2, with 4 spends in the ledger
    model = (path / "model.safetensors").read_bytes()
    with pytest.raises(PrivacyError, match="the budget is spent: 4 releases"):
        fedblur.resume(path)
    message = refuse("resume", str(path))
    assert "the budget is spent" in message
    assert "start a new run" in message
    assert len(model) == (path / "model.safetensors").stat().st_size


def test_not_a_run_folder(tmp_path: Path) -> None:
    assert "is not a run folder" in refuse("resume", str(tmp_path))


def test_missing_or_broken_configuration_file(tmp_path: Path) -> None:
    assert "does not exist" in refuse("run", str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    assert "is not valid TOML" in refuse("run", str(tmp_path / "bad.toml"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nothing can be made")
def test_unwritable_folder(tmp_path: Path) -> None:
    message = refuse("run", *QUICK, "--out", "/proc/self/nothing-here")
    assert "/proc/self/nothing-here" in message
    assert "choose another --out" in message


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc, which names open files")
@pytest.mark.parametrize("file", ["checkpoints/.round-", "ledger.jsonl"])  # what no longer finds room on the disk
def test_full_disk__keeps_the_last_checkpoint(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fills_up(descriptor: int) -> None:
        begun = (tmp_path / "run" / "checkpoints" / "round-000002.safetensors").exists()
        if begun and file in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("fedblur.core.files.os.fsync", fills_up)
        message = refuse(
            "run",
            "--rounds",
            "8",
            "--quiet",
            "--seed",
            "1",
            "--set",
            "checkpoint_every=1",
            "--out",
            str(tmp_path / "run"),
        )
    assert "No space left on device" in message
    assert "free space" in message
    assert invoke("resume", str(tmp_path / "run"), "--quiet").exit_code == 0  # space is back: it goes on
    whole = tmp_path / "whole"
    invoke("run", "--rounds", "8", "--quiet", "--seed", "1", "--set", "checkpoint_every=1", "--out", str(whole))
    assert (whole / "model.safetensors").read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()
    shutil.rmtree(whole)


def test_diverged_error_is_a_user_error() -> None:
    assert issubclass(DivergedError, fedblur.FedBlurError)


def test_memory__that_is_full_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        end_of_a_bug(MemoryError("malloc of size 524352 failed"))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the memory of this machine or process is full; use fewer rows")
    assert "Traceback" not in said
