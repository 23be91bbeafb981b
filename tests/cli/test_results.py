"""`fedblur results`: lists cells, shows one, names what is near a slip, and packs a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.commandline import invoke

PAPERS = Path(__file__).resolve().parents[2] / "papers"
TABLE = PAPERS / "cheng2022/results/table1.jsonl.gz"
CELL = "table1: DP-FedAvg | epsilon=2 | seed=0"


def test_results__lists_the_cells_of_a_file_and_of_a_folder() -> None:
    cells = json.loads(invoke("results", TABLE, "--json"))["cells"]
    assert len(cells) == 33
    assert [cell["cell"] for cell in cells] == sorted(cell["cell"] for cell in cells)
    everything = json.loads(invoke("results", PAPERS / "cheng2022", "--json"))["cells"]
    assert len(everything) == 206
    assert [cell for cell in cells if cell not in everything] == []
    text = invoke("results", TABLE)
    assert all(cell["key"] in text for cell in cells)


@pytest.mark.parametrize("word", [CELL, "DP-FedAvg | epsilon=2 | seed=0", "KEY"])
def test_results__shows_a_cell_by_name_by_key_or_by_a_part_that_it_alone_has(word: str) -> None:
    cells = json.loads(invoke("results", TABLE, "--json"))["cells"]
    cell = next(cell for cell in cells if cell["cell"] == CELL)
    word = cell["key"] if word == "KEY" else word
    whole = json.loads(invoke("results", TABLE, word, "--json"))
    assert (whole["cell"], whole["accuracy"]) == (CELL, cell["accuracy"])
    assert whole["curve"]
    assert whole["norms"]
    text = invoke("results", TABLE, word)
    assert f"{100 * cell['accuracy']:.2f} % on test data after 1000 rounds" in text
    assert "NOT PRIVATE: seeded" in text
    assert "local.steps = " in text


def test_results__an_unknown_cell_is_an_error_that_names_what_is_near() -> None:
    answer = " ".join(invoke("results", TABLE, "table1: DP-FedAvg | epsilom=2 | seed=0", status=2).split())
    assert "no cell 'table1: DP-FedAvg | epsilom=2 | seed=0' among 33" in answer
    assert CELL in answer
    answer = " ".join(invoke("results", TABLE, "DP-FedAvg", status=2).split())
    assert "'DP-FedAvg' fits" in answer
    assert "give a whole name or key" in answer


def test_results__what_holds_none_is_an_error(tmp_path: Path) -> None:
    assert "does not exist" in " ".join(invoke("results", tmp_path / "nothing", status=2).split())
    assert "holds no results" in " ".join(invoke("results", tmp_path, status=2).split())
    (tmp_path / "cut.jsonl.gz").write_bytes(TABLE.read_bytes()[:-100])
    assert "damaged" in " ".join(invoke("results", tmp_path / "cut.jsonl.gz", status=2).split())
    assert "takes a folder and no cell" in " ".join(invoke("results", TABLE, "--pack", status=2).split())


def test_results__pack_says_what_it_made_and_then_has_nothing_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "results"
    folder.mkdir(parents=True)
    for cell in json.loads(invoke("results", TABLE, "--json"))["cells"][:3]:
        (folder / f"{cell['key']}.json").write_text(invoke("results", TABLE, cell["key"], "--json"))
    before = invoke("results", tmp_path / "out", "--json")
    assert "table1.jsonl.gz: 3 cells" in invoke("results", tmp_path / "out", "--pack").replace("\n", "")
    assert [path.name for path in folder.iterdir()] == ["table1.jsonl.gz"]
    assert invoke("results", tmp_path / "out", "--json") == before
    assert "nothing to pack" in invoke("results", folder, "--pack").replace("\n", " ")
    shutil.copy(TABLE, folder)
    assert json.loads(invoke("results", folder, "--pack", "--json")) == {"packed": {}}
