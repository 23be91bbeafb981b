"""Defects that an attack on commit f284e93 found, each as a test that fails there."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sweeps.disk import Disk, Killed
from tests.sweeps.worlds import MACHINE, SEARCH, demand, invoke, model_round, spends, stopped, write_files


@pytest.fixture
def world(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "world"
    write_files(folder)
    return folder


def run(world: Path, file: str = "private.toml") -> list[str]:
    return ["run", f"{world}/{file}", "--out", f"{world}/run", *MACHINE]


@pytest.mark.parametrize("mode", ["before", "torn", "after", "full"])
def test_known__a_first_checkpoint_that_fails_does_not_wedge_the_folder(world: Path, mode: str) -> None:
    kept = world.with_name("kept")
    shutil.copytree(world, kept)
    disk = Disk(world)
    with disk.active():
        demand(run(world))
    names = [(operation.kind, "checkpoints/.round-000000" in operation.path) for operation in disk.operations]
    shutil.rmtree(world)
    shutil.copytree(kept, world)
    disk = Disk(world, names.index(("write", True)), mode)
    with disk.active(), contextlib.suppress(Killed):
        assert invoke(run(world)).status == 2
    assert spends(world / "run/ledger.jsonl") == 0
    demand(run(world))


@pytest.mark.parametrize("table", ["private-table.toml", "table.toml"])
def test_known__a_first_checkpoint_that_fails_does_not_wedge_a_table(world: Path, table: str) -> None:
    words = ["table", f"{world}/{table}", "--out", f"{world}/out", *MACHINE]
    kept = world.with_name("kept")
    shutil.copytree(world, kept)
    disk = Disk(world)
    with disk.active():
        demand(words)
    at = next(
        i for i, op in enumerate(disk.operations) if "checkpoints/.round-000000" in op.path and op.kind == "write"
    )
    shutil.rmtree(world)
    shutil.copytree(kept, world)
    with Disk(world, at, "torn").active(), pytest.raises(Killed):
        invoke(words)
    demand(words)


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_known__a_flipped_byte_in_the_newest_checkpoint_does_not_bring_an_earlier_model(world: Path) -> None:
    demand(run(world))
    folder = world / "run"
    before = {name: (folder / name).read_bytes() for name in ("model.safetensors", "summary.json")}
    _flip(folder / "checkpoints/round-000002.safetensors", -1)
    invoke(["resume", str(folder), *MACHINE])
    assert (folder / "model.safetensors").read_bytes() == before["model.safetensors"]
    assert b'"complete"' in (folder / "summary.json").read_bytes()


def test_known__a_bit_in_a_checkpoints_round_is_found(world: Path) -> None:
    stopped(world, "seeded.toml", world / "run", after=2)
    path = world / "run/checkpoints/round-000002.safetensors"
    data = path.read_bytes()
    place = data.index(b'\\"round\\": 2') + len(b'\\"round\\": ')
    path.write_bytes(data[:place] + b"3" + data[place + 1 :])
    outcome = invoke(["resume", str(world / "run"), *MACHINE])
    assert outcome.status == 0
    assert "corrupt" in outcome.said
    assert model_round(world / "run") == 3
    other = world.with_name("undisturbed")
    write_files(other)
    demand(run(other, "seeded.toml"))
    assert (other / "run/model.safetensors").read_bytes() == (world / "run/model.safetensors").read_bytes()


def test_known__a_search_without_its_summary_releases_no_second_winner(world: Path) -> None:
    words = ["tune", f"{world}/private-grid.toml", "--out", f"{world}/run", *MACHINE, *SEARCH]
    demand(words)
    model = (world / "run/model.safetensors").read_bytes()
    for name in ("summary.json", "ledger.jsonl"):
        (world / "run" / name).unlink()
        assert invoke(words).status == 2
        assert (world / "run/model.safetensors").read_bytes() == model


def test_known__a_run_that_is_refused_leaves_a_ledger_with_spends_alone(world: Path) -> None:
    stopped(world, "private.toml", world / "run")
    for name in ("checkpoints", "rounds.jsonl", "summary.json", "model.safetensors"):
        path = world / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    ledger = (world / "run/ledger.jsonl").read_bytes()
    assert invoke([*run(world), "--data-dir", str(world)]).status == 2
    assert (world / "run/ledger.jsonl").read_bytes() == ledger


def test_known__a_byte_that_is_not_utf8_in_the_rounds_does_not_block_resume(world: Path) -> None:
    stopped(world, "private.toml", world / "run")
    with (world / "run/rounds.jsonl").open("ab") as file:
        file.write(b'{"round": 1, "accuracy": "\xff"}\n')
    demand(["resume", str(world / "run"), *MACHINE])


def _set(*words: str) -> Callable[[Path], list[str]]:
    return lambda world: [*run(world), *words]


def _toml(text: str, command: str = "run") -> Callable[[Path], list[str]]:
    def words(world: Path) -> list[str]:
        (world / "odd.toml").write_text(text)
        return [command, f"{world}/odd.toml", "--out", f"{world}/run", *MACHINE]

    return words


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (_set("--set", "noise_multiplier=1e-5"), "noise_multiplier=1e-05"),
        (_set("--set", "sample_rate=1e-300"), "sample_rate=1e-300"),
        (_set("--set", f"rounds={2**70}"), f"rounds={2**70}"),
        (_toml("rounds = " + "[" * 20_000), "nested too deeply"),
        (_toml("rows = 3", "table"), "rows = 3"),
        (_set("--set", "local.steps.x=1"), "local.steps.x"),
        (_toml("method = 3\n", "run"), "method=3"),
        (_toml("metrics = 3\n", "run"), "metrics=3 must be a name or a list of parts, like metrics ="),
        (lambda world: [*_toml("method = 3\n")(world), "--set", "method.blur.strength=1"], "method=3"),
    ],
)
def test_known__an_odd_input_is_one_line_that_names_it(
    world: Path, words: Callable[[Path], list[str]], named: str
) -> None:
    outcome = invoke(words(world))
    assert (outcome.status, outcome.bug) == (2, "")
    assert named in outcome.said
    assert not (world / "run").exists()


def test_known__markup_in_a_label_is_text(world: Path) -> None:
    text = (world / "private-table.toml").read_text().replace('"private"', '"[/b] x"')
    (world / "private-table.toml").write_text(text)
    outcome = demand(["table", f"{world}/private-table.toml", "--out", f"{world}/out", *MACHINE])
    assert "[/b] x" in outcome.out


@pytest.mark.parametrize(("key", "value"), [("metrics", "3"), ("metrics", "[3]"), ("task", '"x"'), ("task", "3")])
def test_known__a_damaged_configuration_is_one_line_in_a_report(world: Path, key: str, value: str) -> None:
    demand(run(world))
    path = world / "run/config.json"
    table = json.loads(path.read_text()) | {key: json.loads(value)}
    path.write_text(json.dumps(table))
    outcome = invoke(["report", f"{world}/run"])
    assert (outcome.status, outcome.bug) == (2, "")
    assert f"{key} is not what fedblur writes" in outcome.said


def test_known__a_part_that_is_null_is_one_line(world: Path) -> None:
    (world / "odd.json").write_text('{"mechanism": null}')
    outcome = invoke(["run", f"{world}/odd.json", "--out", f"{world}/run", *MACHINE])
    assert (outcome.status, outcome.bug) == (2, "")
    assert "mechanism=None must be set" in outcome.said


def test_known__an_edited_list_of_a_table_s_cells_counts_as_none(world: Path) -> None:
    demand(["table", f"{world}/table.toml", "--out", f"{world}/out", *MACHINE])
    path = world / "out/tables/table.json"
    path.write_text(re.sub(r'"results": "[^"]*"', '"results": 3', path.read_text()))
    demand(["report", f"{world}/out"])


def test_known__markup_in_names_that_are_shown_is_text(world: Path) -> None:
    words = ["tune", f"{world}/grid.toml", "--out", f"{world}/out", *MACHINE[:-1], "--proxy", "[/b]"]
    assert (invoke(words).bug, "[/b]" in invoke(words).said) == ("", True)
    words = ["run", f"{world}/private.toml", "--population", "ward-3", "--out", f"{world}/[/b]", *MACHINE]
    demand(words)
    assert "[/b]" in demand(["population", "show", "ward-3"]).said.replace(" ", "")
    assert demand(["data", "list", "--data-dir", f"{world}/[/b]"]).bug == ""
