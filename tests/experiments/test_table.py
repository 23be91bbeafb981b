"""Tables as data: expansion, results by hash, going on where it stopped, mean ± std."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedblur.cli.app import app
from fedblur.core.config import read_toml
from fedblur.core.errors import ConfigError
from fedblur.experiments.recipe import configure
from fedblur.experiments.table import aggregate, read_spec, run_table
from fedblur.training.machine import Machine

SPEC = """
title = "a small table"
[base]
rounds = 2
sample_rate = 0.1
[axes]
epsilon = [2, 8]
seed = [0, 1]
[[rows]]
label = "DP-FedAvg"
[[rows]]
label = "BLUR"
method = ["blur"]
[expected]
"BLUR | epsilon=8" = 74.5
"""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SPEC)
    return tmp_path / "small.toml"


def test_spec__is_rows_times_axes(spec_file: Path) -> None:
    spec = read_spec(spec_file)
    assert len(spec.cells) == 2 * 2 * 2
    assert len({cell.key for cell in spec.cells}) == 8
    assert spec.cells[-1].group == "BLUR | epsilon=8"


def test_table__goes_on_where_it_stopped(spec_file: Path, tmp_path: Path) -> None:
    spec = read_spec(spec_file)
    started = []

    def stop_at_the_fourth(cell, index):
        started.append(index)
        if len(started) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_table(spec, tmp_path / "out", Machine(), stop_at_the_fourth)
    assert len(list((tmp_path / "out" / "results").iterdir())) == 3
    started.clear()
    results = run_table(spec, tmp_path / "out", Machine(), lambda cell, index: started.append(index))
    assert started == [3, 4, 5, 6, 7]
    assert len(results) == 8


def test_table__prints_mean_and_spread_beside_the_papers_figure(spec_file: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["table", str(spec_file), "--out", str(tmp_path / "out"), "--quiet"])
    assert result.exit_code == 0, result.output
    assert "74.50" in result.stdout
    assert "±" in result.stdout
    assert "NOT PRIVATE: seeded" in result.stdout
    spec = read_spec(spec_file)
    stored = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "out" / "results").iterdir()}
    lines = aggregate(spec, stored)
    scores = [100 * stored[c.key]["accuracy"] for c in spec.cells if c.group == "BLUR | epsilon=8"]
    line = next(line for line in lines if line.group == "BLUR | epsilon=8")
    assert line.accuracy == pytest.approx(sum(scores) / 2)
    assert line.spread == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[bse]\nrounds = 2", "unknown section 'bse': did you mean 'base'?"),
        ("[base]\nroundz = 2", "unknown key 'roundz': did you mean 'rounds'?"),
        ("[axes]\nseed = 3", "axes.seed=3 must be a list"),
        ("[[rows]]\nmethod = 'blur'", "needs a label"),
        ("[expected]\n'nobody' = 3.0", "is no row of the table"),
        ("[shared.cnn]\nrounds = 2\n[[rows]]\nlabel = 'x'\nuse = ['cn']", "did you mean 'cnn'?"),
        ("base = 3", "base = 3 must be a section"),
        ("[shared]\ncnn = 3", "shared.cnn = 3 must be a section, [shared.cnn]"),
        ("[shared.cnn]\nrounds = 2\n[[rows]]\nlabel = 'x'\nuse = 'cnn'", "use='cnn' of row 'x' must be a list"),
    ],
)
def test_spec__mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_spec(tmp_path / "bad.toml")
    assert message in str(caught.value)


def test_axes__reach_into_parts(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        '[axes]\n"method.blur.strength" = [0.1, 0.8]\n[[rows]]\nlabel = "x"\nmethod = "blur"'
    )
    assert [cell.config.method[0].strength for cell in read_spec(tmp_path / "s.toml").cells] == [0.1, 0.8]


def test_rows__put_shared_settings_over_the_base_and_their_own_over_those(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("""
[base]
rounds = 5
clip_norm = 0.1
[shared.short]
rounds = 2
server = { name = "momentum", momentum = 0.8 }
[shared.wide]
clip_norm = 0.2
[[rows]]
label = "base"
[[rows]]
label = "shared"
use = ["short", "wide"]
"server.learning_rate" = 3.0
[[rows]]
label = "own"
use = ["short"]
rounds = 3
axes = { "server.momentum" = [0.5] }
""")
    base, shared, own = (cell.config for cell in read_spec(tmp_path / "s.toml").cells)
    assert (base.rounds, base.clip_norm) == (5, 0.1)
    assert (shared.rounds, shared.clip_norm) == (2, 0.2)
    assert (shared.server.learning_rate, shared.server.momentum) == (3.0, 0.8)
    assert (own.rounds, own.clip_norm, own.server.momentum) == (3, 0.1, 0.5)


def test_examples__every_configuration_in_the_repository_is_valid() -> None:
    root = Path(__file__).resolve().parents[2]
    specs = [*(root / "examples").glob("*.toml"), *(root / "papers").glob("*/*.toml")]  # page/ has none: tests/papers
    assert specs
    for path in specs:
        table = read_toml(path)
        if not {"base", "rows"} & table.keys():  # the configuration of one run; the plugins of others: test_examples
            assert "plugins" in table or configure(table)
        else:
            assert read_spec(path).cells
