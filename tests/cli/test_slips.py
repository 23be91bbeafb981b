"""Slips that used to pass without a word, or with the wrong one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedblur.cli.app import app, main
from fedblur.core.callbacks import SAVED
from fedblur.core.config import from_dict
from fedblur.core.errors import ConfigError
from fedblur.experiments.table_spec import read_spec
from tests.commandline import forgotten_parts, invoke

ROOT = Path(__file__).resolve().parents[2]
GRID = "[base]\nrounds = 2\nseed = 1\n[axes]\nclip_norm = [0.05, 0.1]\n"


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


@pytest.mark.parametrize("flags", [["--epsilon", "0.5"], ["--trials", "3"], ["--eta", "1"], ["--score", "public"]])
def test_tune__options_of_a_private_search_are_refused_with_a_proxy(flags: list[str], grid: Path) -> None:
    output = invoke("tune", str(grid), "--proxy", "synthetic", *flags, status=2)
    assert f"{flags[0]} is for a private search" in output


def test_tune__a_dry_run_on_proxy_data_runs_nothing(grid: Path, tmp_path: Path) -> None:
    output = invoke("tune", str(grid), "--proxy", "synthetic", "--dry-run", "--out", str(tmp_path / "out"))
    assert "2 configurations, each once on synthetic" in output
    assert "ε = 2" in output
    assert [path.name for path in tmp_path.iterdir()] == ["grid.toml"]


def test_tune__settings_of_a_proxy_need_one(grid: Path) -> None:
    output = invoke("tune", str(grid), "--proxy-set", "clients=3", status=2)
    assert "name those with --proxy" in output


def test_table__a_pattern_that_fits_nothing_is_a_slip(grid: Path) -> None:
    output = invoke("table", str(grid), "--only", "clip_norm=0.7", status=2)
    assert "--only 'clip_norm=0.7' matches no cell; their names are like 'grid: run | clip_norm=0.05" in output


def test_table__rows_of_one_label_mean_one_thing(tmp_path: Path) -> None:
    path = tmp_path / "twice.toml"
    rows = '[[rows]]\nlabel = "ours"\n[[rows]]\nlabel = "ours"\nclip_norm = 0.001\n'
    path.write_text(f"[base]\nrounds = 2\n[axes]\nseed = [0, 1]\n{rows}")
    with pytest.raises(ConfigError, match=r"rows give 'twice: ours \| seed=0' different settings"):
        read_spec(path)


def test_table__is_json_also_where_a_cell_goes_on(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["table", str(grid), "--out", str(out), "--json", "--set", "checkpoint_every=1"]
    whole = CliRunner().invoke(app, command)
    for result in (out / "results").iterdir():
        result.unlink()  # as when it was stopped after its last round
    again = CliRunner().invoke(app, command)
    assert (whole.exit_code, again.exit_code) == (0, 0)
    assert json.loads(again.stdout) == json.loads(whole.stdout)


@pytest.mark.parametrize("table", [{"rounds": True}, {"epsilon": True}, {"seed": False}, {"local": {"steps": True}}])
def test_config__true_is_no_number(table: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="should be a number, not true or false"):
        from_dict(table)
    from_dict({"server": {"name": "adam"}, "model": {"name": "cnn", "dropout": True}, "dataset": "emnist"})


def test_config__a_method_is_named_once() -> None:
    with pytest.raises(ConfigError, match="names 'blur' twice"):
        from_dict({"method": ["blur", "lus", "blur"]})


def test_plan__a_data_set_is_for_the_recipe() -> None:
    plan = ["plan", "--clients", "100", "--sample-rate", "0.1", "--rounds", "10", "--epsilon", "2"]
    output = invoke(*plan, "--dataset", "digits", status=2)
    assert "--dataset=digits is for --recipe" in output


BROKEN = """
from dataclasses import dataclass
import fedblur
@fedblur.register("method", "broken")
@dataclass(frozen=True)
class Broken(fedblur.learning.methods.Method):
    def gradient_term(self, delta, clip_norm):
        if next(iter(delta.values())).norm() > clip_norm:
            return delta
        return None
"""


def test_plugin__an_error_in_a_users_own_file_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    words = ["run", "--plugin", str(path), "--method", "broken", "--rounds", "2", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["fedblur", *words])
    with forgotten_parts(), pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 2, told
    assert f"error: plugin {path}, line 8, gradient_term: RuntimeError: vmap" in told
    assert "Traceback" not in told


def test_report__reads_runs_with_parts_of_ones_own(tmp_path: Path) -> None:
    """As in processes of their own: what a plugin registers stays for as long as its process lives."""
    run, plugin = str(tmp_path / "run"), ["--plugin", str(ROOT / "examples/own_method.py")]
    with forgotten_parts():
        invoke("run", *plugin, "--method", "project", "--rounds", "2", "--out", run, "--quiet")
    with forgotten_parts():
        invoke("report", run, *plugin)
    told = invoke("ledger", "verify", run, status=2)  # neither verified nor found wrong
    assert "was made with own_method.py; give it with --plugin" in told
    assert "--plugin" in invoke("watch", "--help")


def test_ledger_show__says_what_was_released_in_one_line(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    invoke("run", "--rounds", "2", "--out", run, "--quiet")
    lines = invoke("ledger", "show", run).splitlines()
    assert "released PoissonSampled(rate=0.1, inner=Gaussian(noise_multiplier=" in lines[-1]


@pytest.mark.parametrize(
    ("command", "words"),
    [("table", "rerun the command to continue"), ("run", "to continue: fedblur resume runs/x")],
)
def test_stop__says_how_to_continue(command: str, words: str, grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = True

    def stop(*args, **named):
        error = KeyboardInterrupt()
        if saved:
            error.add_note(f"{SAVED} in runs/x")  # as a run does that wrote all it had
        raise error

    monkeypatch.setattr("fedblur.cli.table.run_cells", stop)
    monkeypatch.setattr("fedblur.cli.run.train", stop)
    given = [str(grid)] if command == "table" else ["--rounds", "2"]
    assert f"progress saved; {words}" in invoke(command, *given, status=130)
    saved = False
    output = invoke(command, *given, status=130)
    assert "saved" not in output
    assert ("rerun the command" if command == "table" else "fedblur resume continues it") in output


def test_stop__of_a_command_that_trains_nothing_speaks_of_no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedblur.cli.plan.outlook", stop)
    given = ["--clients", "100", "--sample-rate", "0.1", "--rounds", "5", "--epsilon", "2"]
    assert invoke("plan", *given, status=130) == "stopped\n"
