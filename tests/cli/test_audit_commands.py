"""`fedblur audit`: small result files that are not computed twice, controls that are found, one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedblur.cli.app import app
from fedblur.privacy.mechanisms.gaussian import Gaussian

TABLE = """
[base]
rounds = 3
clients = 30
sample_rate = 0.5
model = { name = "mlp", hidden = [16] }
local = { steps = 1 }
[axes]
epsilon = [2.0]
seed = [0]
[[rows]]
label = "plain"
[[rows]]
label = "lus"
method = "lus"
"""
FEW = ("--canaries", "100", "--held-out", "100", "--quiet")


def invoke(*words: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result.output


def test_audit__a_table_gives_one_small_file_each_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(TABLE)
    out = tmp_path / "audits"
    shown = invoke("audit", tmp_path / "spec.toml", "--out", out, "--control", *FEW)
    files = sorted(out.glob("*.json"))
    assert len(files) == 4  # two cells and a control for each row
    assert len(list(out.glob("*.png"))) == 4
    assert all(path.stat().st_size < 5000 for path in files)
    assert "(noise removed)" in shown
    times = [path.stat().st_mtime_ns for path in files]
    files[0].unlink()
    answer = json.loads(invoke("audit", tmp_path / "spec.toml", "--out", out, "--control", "--json", *FEW))
    assert [path.stat().st_mtime_ns for path in files][1:] == times[1:]
    assert sum(result["noise_removed"] for result in answer) == 2
    claims = [result["claimed_epsilon"] for result in answer if result["noise_removed"]]
    assert claims == pytest.approx([2.0, 2.0], rel=1e-3)


def test_audit__of_a_run_folder_uses_its_configuration_and_enters_its_statement(tmp_path: Path) -> None:
    run = tmp_path / "run"  # seeded: one in some hundred audits of a private run is above its claim by chance
    invoke("run", "--rounds", 2, "--clients", 30, "--quiet", "--out", run, "--sample-rate", 0.5, "--seed", 0)
    invoke("audit", run, *FEW)
    (result,) = (run / "audit").glob("*.json")
    assert result.stat().st_mode & 0o077 == 0  # its checks read cohorts and norms
    assert json.loads(result.read_text())["rounds"] == 2
    invoke("statement", run)
    assert "empirical audit" in (run / "statement.md").read_text()


FAST = ("--worst-case", "--repetitions", 400, "--quiet", "--device", "cpu")


def test_audit__worst_case_is_a_line_and_one_for_each_check() -> None:
    bound, *checks = invoke("audit", *FAST).splitlines()
    assert "one release at ε = 2, δ = 0.01" in bound
    assert "no violation found" in bound
    names = [line.split(": ")[1] for line in checks]
    assert names[:2] == ["messages fit the noise", "variance of the noise"]
    assert names[-2:] == ["others' messages", "sensitivity of the sum"]
    assert all(line.startswith("  holds (p = ") for line in checks)


def test_audit__worst_case_of_a_configuration_says_how_many_of_its_rounds_it_ran(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('epsilon = 1.0\nsample_rate = 0.2\nrounds = 50\nmask = "random"\nseed = 0')
    (found,) = json.loads(invoke("audit", tmp_path / "c.toml", *FAST, "--json"))
    assert (found["claimed"], found["rounds"], found["broken"]) == (1.0, 4, False)
    checks = {check["name"]: check for check in found["checks"]}
    assert "0.2 is accounted for" in checks["sampling rate"]["words"]
    assert all(check["p_value"] is None or check["p_value"] > 1e-6 for check in checks.values())


def test_audit__worst_case_that_finds_something_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Gaussian.draw
    monkeypatch.setattr(Gaussian, "draw", lambda *args: lambda: draw(*args)() // 2)
    shown = invoke("audit", *FAST, status=1)
    assert "BROKEN: weaker than it claims" in shown
    assert "BROKEN (p = 0): variance of the noise" in shown


def test_audit__worst_case_refuses_votes(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('epsilon = 1.0\nmethod = "knn-dpfl"')
    assert "sends votes" in invoke("audit", tmp_path / "c.toml", "--worst-case", status=2)
