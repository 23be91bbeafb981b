"""Results are found by their settings: shared, resumed, never used when stale. Time limits hold."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedblur.cli.app import app
from fedblur.core.errors import RunError
from fedblur.core.files import demand_digest, with_digest
from fedblur.experiments import table as experiments
from fedblur.experiments.result_store import Results, make_result, pack, read_results
from fedblur.experiments.table import TimeLimit, aggregate, pending, run_cells
from fedblur.experiments.table_spec import read_spec
from fedblur.training.machine import Machine
from fedblur.training.run_folder import RunFolder

SPEC = """
title = "one"
results = "kept"
[base]
rounds = 3
sample_rate = 0.1
[[rows]]
label = "BLUR"
method = ["blur"]
axes = { epsilon = [8, 2], seed = [0] }
[[rows]]
label = "DP-FedAvg"
priority = 1
axes = { epsilon = [2], seed = [0, 1] }
[[rows]]
label = "BLUR"
method = ["blur"]
priority = 2
axes = { epsilon = [2], seed = [0] }
"""


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def _run(path: Path, *options: str) -> str:
    out = ["--out", str(path.parent / "runs"), "--quiet"]
    result = CliRunner().invoke(app, ["table", str(path), *out, *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_spec__rows_of_one_label_may_have_axes_and_priorities_of_their_own(tmp_path: Path) -> None:
    spec = read_spec(_write(tmp_path, "a.toml", SPEC))
    assert len(spec.cells) == 4
    order = [cell.name for cell in pending([spec], {})]
    assert order[:2] == ["a: DP-FedAvg | epsilon=2 | seed=0", "a: DP-FedAvg | epsilon=2 | seed=1"]


def test_results__are_shared_by_tables_and_carry_what_a_reader_needs(tmp_path: Path) -> None:
    first = _write(tmp_path, "a.toml", SPEC)
    _run(first)
    results = Results(tmp_path / "kept").found
    assert len(results) == 4
    one = next(iter(results.values()))
    assert {"config", "settings", "curve", "norms", "seconds", "machine", "hardware", "date", "versions"} <= set(one)
    assert one["privacy"]["signal_to_noise"] > 0
    assert [point[0] for point in one["curve"]] == [1, 2, 3]
    assert len(one["norms"][0]["norm_quantiles"]) == 5
    second = read_spec(_write(tmp_path, "b.toml", SPEC.replace('label = "BLUR"', 'label = "other name"')))
    assert not pending([second], Results(tmp_path / "kept").found)


def test_results__that_are_shared_hold_nothing_that_is_local_only(tmp_path: Path) -> None:
    """Whatever a run's diagnostics are, a table's own file and the packed one have the same bytes."""
    spec = read_spec(_write(tmp_path, "a.toml", SPEC)).only(["BLUR | epsilon=8"])
    _run(tmp_path / "a.toml", "--only", "BLUR | epsilon=8")
    (cell,) = spec.cells
    run = RunFolder(tmp_path / "runs/cells" / cell.key)
    summary, rows = json.loads(run.summary.read_text()), run.read_rounds()
    assert summary["local_only"]["clipped_share"] is not None
    changed = [
        {**row, "seconds": 7.0, "local_only": {"clipped_share": 0.123, "norm_quantiles": [9.0] * 5, "cohort": 77}}
        for row in rows
    ]
    other = {**summary, "local_only": {"clipped_share": 0.123}, "seconds": 7.0}
    written = []
    for name, summary_, rows_ in (("one", summary, rows), ("two", other, changed)):
        store = Results(tmp_path / name)
        kept = store.write(cell.key, make_result({"cell": cell.name, "table": "a"}, cell.config, summary_, rows_))
        assert kept["norms"]  # seeded: known to this process, and on this machine
        private = tmp_path / f"{name}-local-only"
        assert all(path.stat().st_mode & 0o077 == 0 for path in (private, *private.iterdir()))
        assert Results(tmp_path / name).found == store.found
        plain = (tmp_path / name / f"{cell.key}.json").read_bytes()
        (packed,) = pack(tmp_path / name)
        written.append((plain, packed.read_bytes()))
        (shared,) = read_results(packed)
        assert not {"local_only", "norms", "seconds"} & shared.keys()
    assert written[0] == written[1]
    shutil.rmtree(tmp_path / "one-local-only")  # as on the machine of someone who was given the results
    assert Results(tmp_path / "one").found[cell.key]["norms"] == []
    assert aggregate(spec, Results(tmp_path / "one").found)[0].clipped is None


def test_results__keep_the_title_and_the_order_of_rows_and_axes(tmp_path: Path) -> None:
    rows = 'rows = [{ label = "x", axes = { sample_rate = [0.5, 0.1], epsilon = [8], seed = [0] } }]\n'
    spec = read_spec(_write(tmp_path, "a.toml", f'title = "A table"\n{rows}[base]\nrounds = 1\n'))
    results = Results(tmp_path / "kept")
    run_cells(spec.cells, results, tmp_path / "cells", Machine(device="cpu"))
    found = sorted(results.found.values(), key=lambda result: result["position"])
    assert [result["axes"]["sample_rate"] for result in found] == [0.5, 0.1]
    assert all(result["title"] == "A table" for result in found)
    assert all(result["axis_order"] == ["sample_rate", "epsilon", "seed"] for result in found)


def test_results__of_other_settings_are_named_as_stale_and_never_used(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.toml", SPEC)
    _run(path, "--only", "BLUR | epsilon=8")
    assert len(Results(tmp_path / "kept").found) == 1
    _write(tmp_path, "a.toml", SPEC.replace("rounds = 3", "rounds = 2"))
    output = _run(path, "--only", "BLUR | epsilon=8")
    assert "stale" in output
    assert "rounds: 3 -> 2" in output
    assert len(Results(tmp_path / "kept").found) == 2


def test_results__that_are_stale_for_one_reason_take_one_line(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.toml", SPEC)
    _run(path)
    _write(tmp_path, "a.toml", SPEC.replace("rounds = 3", "rounds = 2"))
    output = _run(path, "--only", "BLUR | epsilon=8")
    assert output.count("stale: ") == output.count("rounds: 3 -> 2; and 3 more like it; it is not used") == 1


def test_results__survive_settings_that_the_library_learns_later(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.toml", SPEC)
    _run(path, "--only", "seed=1")
    stored = next((tmp_path / "kept").iterdir())
    result = json.loads(stored.read_text())
    del result["config"]["averaging"], result["digest"]  # as an older version, which knew neither, would have written
    stored.write_text(json.dumps(result))
    assert len(pending([read_spec(path)], Results(tmp_path / "kept").found)) == 3
    result["config"]["unheard_of"] = 1
    stored.write_text(json.dumps(result))
    assert "unheard_of" in str(Results(tmp_path / "kept").broken[0])


def test_pack__makes_one_file_a_table_that_is_found_and_goes_on(tmp_path: Path) -> None:
    path, kept = _write(tmp_path, "a.toml", SPEC), tmp_path / "kept"
    _run(path, "--only", "DP-FedAvg")
    before = Results(kept).found
    (stored,) = pack(kept).items()
    assert stored == (kept / "a.jsonl.gz", 2)
    assert [file.name for file in kept.iterdir()] == ["a.jsonl.gz"]
    assert Results(kept).found == before
    assert [cell.label for cell in pending([read_spec(path)], Results(kept).found)] == ["BLUR", "BLUR"]
    _run(path)  # goes on, beside the packed file
    assert len([*kept.glob("*.json")]) == 2
    whole = Results(kept).found
    assert len(whole) == 4
    assert pack(kept) == {kept / "a.jsonl.gz": 4}
    assert Results(kept).found == whole
    assert [result["cell"] for result in read_results(kept)] == sorted(result["cell"] for result in whole.values())


def test_pack__makes_the_same_bytes_of_the_same_results(tmp_path: Path) -> None:
    _run(_write(tmp_path, "a.toml", SPEC))
    shutil.copytree(tmp_path / "kept", tmp_path / "other")
    pack(tmp_path / "kept")
    for file in sorted((tmp_path / "other").iterdir(), reverse=True):  # in two steps, and in another order
        (tmp_path / "steps").mkdir(exist_ok=True)
        shutil.move(file, tmp_path / "steps" / file.name)
        pack(tmp_path / "steps")
    assert (tmp_path / "steps/a.jsonl.gz").read_bytes() == (tmp_path / "kept/a.jsonl.gz").read_bytes()


def test_pack__keeps_results_that_this_version_refuses_and_stops_at_what_is_none(tmp_path: Path) -> None:
    _run(_write(tmp_path, "a.toml", SPEC), "--only", "seed=1")
    kept = tmp_path / "kept"
    (file,) = kept.iterdir()
    result = json.loads(file.read_text())
    result["config"]["unheard_of"] = 1
    with pytest.raises(RunError, match="its digest does not match"):
        demand_digest(result, file)
    result = with_digest(result)
    file.write_text(json.dumps(result))
    pack(kept)
    assert read_results(kept) == [result]
    assert "unheard_of" in str(Results(kept).broken[0])
    (kept / "notes.json").write_text("{}")
    with pytest.raises(RunError, match=r"notes\.json holds no results"):
        pack(kept)
    (kept / "notes.json").write_text('{"settings": "x", "table": "../up"}')
    with pytest.raises(RunError, match="cannot be a file's name"):
        pack(kept)
    assert read_results(kept, strict=False)[1] == result


def test_pack__a_damaged_file_is_named_and_costs_no_result(tmp_path: Path) -> None:
    _run(_write(tmp_path, "a.toml", SPEC), "--only", "seed=1")
    kept = tmp_path / "kept"
    (kept / "a.jsonl.gz").write_bytes(b"\x1f\x8b cut off")
    assert "cannot be read" in str(Results(kept).broken[0])
    assert len(Results(kept).found) == 1
    with pytest.raises(RunError, match="damaged"):
        pack(kept)
    assert len([*kept.glob("*.json")]) == 1


def test_results__a_packed_file_is_not_decompressed_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 2**22 + b"\n"))
    monkeypatch.setattr("fedblur.experiments.result_store._MOST_BYTES", 2**20)
    with pytest.raises(RunError, match="a.jsonl.gz .*more than 1,048,576 bytes"):
        read_results(path)
    assert "more than 1,048,576 bytes" in str(Results(tmp_path).broken[0])


def test_time__a_cell_that_is_cut_off_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(_write(tmp_path, "a.toml", SPEC))
    cells, results = pending([spec], {})[:1], Results(tmp_path / "kept")
    limit = TimeLimit(minutes=5)
    seen: list[int] = []

    def late(row: dict) -> None:
        seen.append(row["round"])
        if row["round"] == 2:
            limit.started -= 600

    left = run_cells(cells, results, tmp_path / "cells", Machine(), lambda cell, index: late, limit=limit)
    assert left == cells
    assert not results.found
    summary = json.loads((tmp_path / "cells" / cells[0].key / "summary.json").read_text())
    assert summary["status"] == "stopped after 2 of 3 rounds"
    assert not run_cells(cells, results, tmp_path / "cells", Machine(), lambda cell, index: late)
    assert seen == [1, 2, 3]


def test_time__no_cell_is_started_that_would_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "estimate", lambda *arguments: 90.0)
    spec = read_spec(_write(tmp_path, "a.toml", SPEC))
    cells = pending([spec], {})
    left = run_cells(cells, Results(tmp_path), tmp_path / "c", Machine(device="cpu"), limit=TimeLimit(1))
    assert left == cells


def test_dry_run__lists_noise_and_time_and_runs_nothing(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.toml", SPEC)
    output = _run(path, "--dry-run")
    assert "noise σ" in output
    assert "unknown" in output  # nobody has measured logistic regression
    assert "4 cells, 0 of them done" in output
    assert not (tmp_path / "kept").exists()
    _run(path, "--only", "seed=1")
    assert "4 cells, 1 of them done" in _run(path, "--dry-run")
    assert "1 cells, 1 of them done" in _run(path, "--dry-run", "--only", "seed=1")


WIDE = """
title = "wide"
results = "kept"
[base]
rounds = 2
sample_rate = 0.1
[[rows]]
label = "without fixed features: a network of a million parameters, and then some more words"
axes = { epsilon = [2, 8], "server.learning_rate" = [0.125], "local.learning_rate" = [0.125], seed = [0] }
[[rows]]
label = "another"
axes = { clip_norm = [0.5] , seed = [0, 1] }
"""


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_table__narrow_terminals_cut_nothing_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    path = _write(tmp_path, "a.toml", WIDE)
    for output, last in ((_run(path, "--dry-run"), "time"), (_run(path), "clipped")):  # rows have axes of their own
        assert "…" not in output.split("Final round")[0]
        assert all(word in output for word in ("without", "another", "learning_rate", "clip_norm", last))
        assert next(line.rstrip()[-1] for line in output.splitlines() if " another " in line) in "%n"  # unknown, or %


def test_footer__tells_how_every_row_was_sampled_not_only_the_first(tmp_path: Path) -> None:
    rates = "axes = {{ sample_rate = {rates}, seed = [0] }}\n"
    text = 'results = "kept"\n[base]\nrounds = 1\n[[rows]]\nlabel = "x"\n'
    few = " ".join(_run(_write(tmp_path, "a.toml", text + rates.format(rates=[0.1, 0.5]))).split())
    assert (
        "joins a round with probability 0.1; or Poisson: each of 359 clients joins a round with probability 0.5" in few
    )
    assert few.count("359 clients.") == 1  # what rows share is said once
    many = " ".join(_run(_write(tmp_path, "b.toml", text + rates.format(rates=[0.1, 0.2, 0.3, 0.5]))).split())
    assert "probability 0.1; or 3 others (each run's statement has its own)" in many


def test_table__several_files_run_in_one_process_and_print_each(tmp_path: Path) -> None:
    first, second = _write(tmp_path, "a.toml", SPEC), _write(tmp_path, "b.toml", SPEC.replace('"one"', '"two"'))
    output = _run(first, str(second), "--set", "rounds=2")
    assert "one" in output
    assert "two" in output
    assert len(Results(tmp_path / "kept").found) == 4
