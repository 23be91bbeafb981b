"""The first hour of a new user: typical mistakes, tried as they are made. Each is one line that says what to do.

What is here came from playing that user in an empty folder; tests/e2e/test_bad_input.py has the rest.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import fedblur
from fedblur.cli.app import app
from fedblur.core.errors import FedBlurError

RUN = ["--rounds", "2", "--seed", "1", "--quiet"]


@pytest.fixture(autouse=True)
def _new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refuse(*words: object) -> str:
    """A command that must be refused with status 2 and one line; returns the line."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""
    return result.stderr


# --- words of a command ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("rnu", "No such command 'rnu': did you mean 'run'?"),
        ("data shw digits", "did you mean 'show'? (see fedblur data --help)"),
        ("run --epsilonn 2", "did you mean '--epsilon'? (see fedblur run --help)"),
        ("run --epsilon two", "'two' is not a valid float (see fedblur run --help)"),
        ("run --partition iid", "give it as --set partition=VALUE"),
        ("run --clip-norm 0.3", "give it as --set clip_norm=VALUE"),
        ("resume", "Missing argument 'RUN' (see fedblur resume --help)"),
        ("run --method blurr", "did you mean 'blur'?"),
        ("run --method blur,lus", 'join several with a plus, like method = "blur+lus"'),
        ("run --method my_method", "name its file: --plugin FILE"),
        ("run --recipe bset", "did you mean 'best'?"),
        ("run digits", "did you mean --dataset digits?"),
        ("run .", "give a TOML file"),
        ("run --set rounds", "must look like key=value, for instance clip_norm=0.3"),
        ("run --set moddel.variant=a", "did you mean 'model'?"),
        ("run --set model.variant=a", "model.logistic has no settings; drop it"),
        ("run --plugin mine.py", "give the path of a Python file"),
        ("run --epsilon 2 --set noise_multiplier=1", "keep one, the other follows"),
        ("run --method fedavg --epsilon 2", "drop one of them"),
        ("run --epsilon 0", "must be above 0 (inf: no noise, no privacy)"),
        ("run --rounds 0", "must be at least 1"),
        ("run --clients 100000", "lower clients"),
        ("run --device cuda:77", "try --device cpu"),
        ("run --dataset femnist --data-dir nowhere", "give one that holds the data sets (or FEDBLUR_DATA)"),
        ("run --dataset plays", 'set model = "char_mlp"'),
        ("run --dataset synthetic --model cnn", 'use "logistic" or "mlp"'),
        ("plan", "for instance: fedblur plan --clients 3400 --sample-rate 0.04 --rounds 1000 --epsilon 2"),
        ("plan --clients 100 --sample-rate 2 --rounds 9 --epsilon 1", "must be in (0, 1]"),
        ("data show digits --plot d.gif", "must end in .png, .svg, .pdf"),
        ("resume runs/none", "give a folder that fedblur run has written"),
        ("ledger show runs", "give a run folder"),
    ],
)
def test_words__are_put_right(words: str, says: str) -> None:
    assert says in refuse(*words.split())
    assert not [path for path in Path().rglob("*") if path != Path("runs")]  # no half-made run is left behind


# --- files ---


@pytest.mark.parametrize(
    ("command", "name", "text", "says"),
    [
        ("run", "c.toml", '{"rounds": 3}', "it looks like JSON; TOML is written key = value"),
        ("run", "c.toml", "epsilom = 2", "did you mean 'epsilon'?"),
        ("run", "c.toml", 'rounds = "many"', "rounds='many'"),
        ("run", "c.toml", "method = 3", 'like method = "augment"'),
        ("run", "c.toml", '[base]\nrounds = 3\n[[rows]]\nlabel = "a"', "start it with: fedblur table c.toml"),
        ("run", "c.json", "[1, 2]", 'a configuration is an object: {"rounds": 100}'),
        ("run", "c.toml", 'plugins = "mine.py"', 'like plugins = ["my_method.py"]'),
        ("table", "c.toml", "rounds = 3", "start it with: fedblur run c.toml"),
        ("table", "c.toml", "[axes]\nepsilon = 2", "like epsilon = [2, 4]"),
        ("tune", "c.toml", "[axes]\nseed = [1, 2]", "drop seed"),
    ],
)
def test_file__is_put_right(command: str, name: str, text: str, says: str) -> None:
    Path(name).write_text(text, encoding="utf-8")
    assert says in refuse(command, name)


# --- run folders ---


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = CliRunner().invoke(app, ["run", *RUN, "--out", "runs/mine"])
    assert result.exit_code == 0, result.output
    return Path("runs/mine")


def test_folder__the_parent_of_a_run_leads_to_it(run: Path) -> None:
    assert f"did you mean {run}?" in refuse("resume", "runs")


def test_folder__all_checkpoints_corrupt(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(b"cut short")
    assert "restore one from a copy, or start a new run" in refuse("resume", run)


def test_folder__of_another_version(run: Path) -> None:
    table = json.loads((run / "config.json").read_text(encoding="utf-8"))
    (run / "config.json").write_text(json.dumps(table | {"clip": 1}), encoding="utf-8")
    assert "was it written by another version of fedblur?" in refuse("statement", run)


def test_folder__without_its_ledger(run: Path) -> None:
    (run / "ledger.jsonl").unlink()
    assert "restore it from a copy" in refuse("resume", run)


def test_folder__that_never_ended(run: Path) -> None:
    (run / "summary.json").unlink()
    assert f"go on with: fedblur resume {run}" in refuse("statement", run)


def test_folder__a_file_is_in_the_way() -> None:
    Path("taken").write_text("x", encoding="utf-8")
    assert "choose another --out" in refuse("run", *RUN, "--out", "taken/run")


def test_folder__of_a_deployment_is_not_empty(run: Path) -> None:
    assert "choose a new folder" in refuse("deploy", "init", "runs")


# --- what is not installed or not there ---


def test_extra__that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fedblur.flower.gateway", raising=False)
    monkeypatch.setitem(sys.modules, "h11", None)
    assert "pip install 'fedblur[flower]'" in refuse("deploy", "gateway")


def test_extra__for_data_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "fedblur[data]" in refuse("data", "fetch", "mnist")


def test_network__that_is_missing_leads_to_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path / "cache"))
    assert "put the parquet files of ylecun/mnist in DIR/mnist" in refuse("data", "fetch", "mnist")


# --- what is allowed and hardly meant is said before it is paid for ---


def test_caution__a_delta_above_one_over_n() -> None:
    result = CliRunner().invoke(app, ["run", "--rounds", "2", "--delta", "0.02", "--json"])
    (caution,) = json.loads(result.stdout)["privacy"]["cautions"]
    assert 'delta=0.02 is above 1/N=0.00279: it permits releasing a random client; set delta = "1/N"' in caution


def test_caution__an_epsilon_that_drowns_the_signal() -> None:
    result = CliRunner().invoke(app, ["run", "--rounds", "2", "--epsilon", "0.01", "--model", "mlp"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "caution: R = " in said
    assert "raise epsilon or sample_rate, or take a smaller model" in said
    assert "CAUTION" in result.stdout


# --- Python ---


def arrays(**changed: object) -> fedblur.Federation:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 5)), rng.integers(0, 3, 40)
    given = {"x": x, "y": y, "owners": np.arange(40) // 4, "test_x": x[:9], "test_y": y[:9]}
    return fedblur.federation_from_arrays(**(given | changed))  # type: ignore[arg-type]


def train(**given: object) -> fedblur.Run:
    return fedblur.train(fedblur.Config(rounds=1, seed=0), **{"federation": arrays(), **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda: fedblur.Config(epsilon="two"), "epsilon='two'"),
        (lambda: fedblur.Config(rounds=2.5), "rounds=2.5"),
        (lambda: fedblur.Config(evaluate="tset"), "'test' or 'validation'"),
        (lambda: fedblur.Config(local=5), "local=5"),
        (lambda: fedblur.LocalTraining(steps="ten"), "local.steps='ten'"),
        (lambda: fedblur.train({"rounds": 3}), "must be a fedblur.Config"),
        (lambda: fedblur.train(fedblur.Config(clients=50), federation=arrays()), "clients=50 has no effect on data of"),
        (lambda: train(module=nn.Linear), "an instance, not its class"),
        (lambda: train(federation=(1, 2)), "fedblur.federation_from_arrays"),
        (lambda: train(machine="cpu"), 'fedblur.Machine(device="cpu")'),
        (lambda: train(module=nn.Linear(7, 3)), "make its first layer fit"),
        (lambda: arrays(y=np.array(["a", "b"] * 20)), "must be an array of numbers"),
        (lambda: arrays(y=np.linspace(0, 1, 40)), "an array of ints"),
        (lambda: arrays(x=[[1.0, 2.0], [3.0]]), "all rows alike"),
        (lambda: arrays(classes=2), "number the labels from 0, or give classes"),
        (lambda: arrays(owners=np.zeros(7, dtype=int)), "each sample needs one"),
        (lambda: arrays(test_x=np.zeros((9, 4))), "they must agree"),
        (lambda: fedblur.register("methd", "mine"), "did you mean 'method'?"),
        (lambda: fedblur.load_federation("mnsit"), "did you mean 'mnist'?"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_python__wrong_values_are_one_line(act: Callable[[], object], says: str) -> None:
    with pytest.raises(FedBlurError) as caught:
        act()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(Path().glob("runs/*"))


def test_python__numbers_of_another_type_mean_the_same_run(tmp_path: Path) -> None:
    """A run that was started with epsilon=2 must be the one that its folder (2.0) describes."""
    done = fedblur.train(fedblur.Config(epsilon=2, rounds=2, sample_rate=np.float64(0.1)), out=tmp_path / "run")
    assert CliRunner().invoke(app, ["ledger", "verify", str(done.path)]).exit_code == 0
    shutil.rmtree(done.path)
