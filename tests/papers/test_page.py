"""The page of the paper shows the results as they are: with none, with some, with all, and nothing typed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from fedblur.experiments.result_store import Results
from fedblur.experiments.table_spec import Cell, read_spec
from papers.rendering.__main__ import main
from papers.rendering.document import read_document
from papers.rendering.render import render_page
from papers.rendering.spending import spent
from papers.rendering.words import in_order
from tests.papers.invented import CHENG, copy_of, invent

PAPER_TEXT = CHENG.parents[1] / "../shared/paper"


def _better(cell: Cell) -> float:
    """As the paper would have it: BLUR + LUS far ahead, most at small ε, small α and in the larger model."""
    base = 0.5 + 0.01 * (cell.config.epsilon or 0) + 0.001 * (cell.config.seed or 0)
    large = cell.config.model.part_name == "resnet18"
    gain = {"BLUR + LUS": 0.1, "LUS": 0.02, "BLUR": 0.04}.get(cell.label.split(",")[0], 0.0)
    shape = 2.0 / (cell.config.epsilon or 1) / (1 + 0.01 * (getattr(cell.config.partition, "alpha", None) or 1))
    falling = 0.002 * cell.config.local.steps if cell.label == "DP-FedAvg" and cell.table == "fig-steps" else 0.0
    moving = cell.config.sample_rate if cell.label == "DP-FedAvg" and cell.table == "fig-sampling" else 0.0
    return base + gain * (1 + shape) * (1.5 if large else 1) - falling + moving


@pytest.mark.parametrize("folder", [CHENG, CHENG.parent / "beyond"], ids=lambda folder: folder.name)
def test_page__is_up_to_date(folder: Path) -> None:
    page = render_page(folder)
    assert page.outdated() == [], "run: make paper"
    assert page.stale == ()
    for target in re.findall(r"\]\(([^)#:]+)\)", page.text):
        assert (folder / target).exists(), target


def test_page__can_be_made_before_the_first_result(tmp_path: Path) -> None:
    folder = copy_of(CHENG, tmp_path / "papers")
    page = render_page(folder)
    page.write()
    assert page.text.count("**not yet measured**") == 10
    assert "No cell has been measured yet" in page.text
    assert "PROVISIONAL: 0 of 40" in page.text
    assert not (folder / "figures").exists()
    assert (
        "DP-FedAvg, momentum 0.9, S = 0.03 | ε = 2, 8; server step = 0.5, 1, 2, 4, 8, 16; seed = 0 (12 cells)"
        in page.text
    )


def test_page__of_all_results_has_every_verdict_and_figure(tmp_path: Path) -> None:
    folder = copy_of(CHENG, tmp_path / "papers")
    cells = invent(folder, _better, lambda cell: 0.5 if cell.label == "BLUR + LUS" else 9.0)
    page = render_page(folder)
    page.write()
    assert "not yet measured" not in page.text
    assert "Nothing: every cell of every table has been measured" in page.text
    assert page.text.count("46 %") == 3  # √(0.5² − 1/25) of their length is what updates have in common
    assert f"{cells:.1f} GPU minutes so far" in page.text or f"{cells} GPU minutes so far" in page.text
    verdicts = dict(re.findall(r"^\| (C\d+)\..*?\| \*\*(.*?)\*\*", page.text, re.MULTILINE))
    assert len(verdicts) == 10
    for name in ("C1", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10"):
        assert verdicts[name].startswith("holds"), name
    assert {path.stem for path in (folder / "figures").iterdir()} == {"blur", "norms", "steps", "sampling", "signal"}
    assert render_page(folder).outdated() == []


def test_page__many_methods_are_listed_and_drawn_one_below_the_other(tmp_path: Path) -> None:
    folder = copy_of(CHENG.parent / "beyond", tmp_path / "papers")
    invent(folder, lambda cell: 0.7 if cell.table == "ablation" and cell.config.seed == 0 else None)
    page = render_page(folder)
    page.write()
    assert "| with LUS | 70.00 | 70.00 |  |" in page.text  # no ceiling has LUS
    drawn = (folder / "figures" / "ablation.svg").read_text()
    labels = {cell.label for cell in read_spec(folder / "ablation.toml").cells}
    assert drawn.count("<!-- with") + drawn.count("<!-- ceiling") == sum(
        label.startswith(("with", "ceiling")) for label in labels
    )


def test_spent__counts_what_ran_on_a_cpu_apart(tmp_path: Path) -> None:
    folder = copy_of(CHENG, tmp_path / "papers")
    invent(folder, lambda cell: 0.6 if cell.table == "table1-tuned" else None)
    store = Results(folder / "results")
    for key in list(store.found)[:5]:
        store.write(key, {**store.found[key], "machine": "sequential, 2 workers on cpu", "hardware": "a CPU"})
    sentence = spent(read_document(folder))
    assert sentence.startswith("7.0 GPU minutes so far")
    assert "for 7 of 250 cells on an invented GPU and 5 more on CPUs," in sentence


def test_page__of_equal_methods_says_that_claims_do_not_hold(tmp_path: Path) -> None:
    folder = copy_of(CHENG, tmp_path / "papers")
    invent(folder, lambda cell: 0.6 + 0.0005 * (cell.config.seed or 0), lambda cell: 20.0)
    text = render_page(folder).text
    for name in ("C1", "C2", "C6", "C8"):
        assert re.search(rf"^\| {name}\..*?\*\*does not hold\*\*", text, re.MULTILINE), name


def test_page__ages_with_a_new_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of(CHENG, tmp_path / "papers")
    assert main([str(folder)]) == 0
    assert main([str(folder), "--check"]) == 0
    invent(folder, lambda cell: 0.5 if cell.table == "fig-norms" else None)
    assert main([str(folder), "--check"]) == 2
    answer = capsys.readouterr().err
    assert "README.md" in answer
    assert "norms.svg" in answer
    assert main([str(folder)]) == 0
    assert main([str(folder), "--check"]) == 0
    invent(folder, lambda cell: 0.5 if cell.table == "fig-norms" else None, lambda cell: 3.0)  # the norms alone change
    assert main([str(folder), "--check"]) == 2
    assert "norms.svg" in capsys.readouterr().err


def test_page__a_result_of_other_settings_is_named_and_not_used(tmp_path: Path) -> None:
    folder = copy_of(CHENG, tmp_path / "papers")
    invent(folder, lambda cell: 0.5 if cell.table == "fig-norms" else None)
    table = folder / "fig-norms.toml"
    table.write_text(table.read_text().replace("clip_norm = 0.1", "clip_norm = 0.2"))
    page = render_page(folder)
    assert len(page.stale) == 4
    assert "clip_norm: 0.1 -> 0.2" in page.text
    assert page.text.count("**not yet measured**") == 10


def test_template__has_no_typed_figure() -> None:
    text = (CHENG / "page" / "README.md.jinja").read_text()
    for pattern in (r"{{.*?}}", r"{%.*?%}", r"{#.*?#}", r"```.*?```", r"`[^`]*`"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    text = re.sub(r"(Table|Figure) \d|ResNet-18|CIFAR-10|CVPR 2022", "", text)
    assert re.findall(r".*\d.*", text) == []


def test_template__an_unknown_name_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of(CHENG, tmp_path / "papers")
    (folder / "page" / "README.md.jinja").write_text("{{ tabel('table1') }}")
    assert main([str(folder)]) == 2
    assert "tabel" in capsys.readouterr().err


@pytest.mark.skipif(not PAPER_TEXT.is_dir(), reason="the paper's text is not here (../shared/paper)")
def test_printed__figures_are_those_of_the_paper() -> None:
    from papers.rendering.document import read_document

    tex = next(PAPER_TEXT.glob("*.txt")).read_text()
    pairs = re.findall(r"([\d.]+)\\pm([\d.]+)", tex)
    printed = read_document(CHENG).printed
    ours = [(v, pm) for name, rows in printed.items() if name[:7] != "Table 3" for v, pm in rows.values()]
    assert sorted((float(v), float(pm)) for v, pm in pairs) == sorted(ours)
    gains = re.findall(r"& \$([\d.]+)\$ & \$\+[\d.]+\s*\$", tex)
    assert [float(value) for value in gains] == [v for v, _ in printed["Table 3, ResNet-18"].values()]


def test_page__a_folder_of_tables_and_a_template_is_enough(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "paper.toml").write_text("")
    (tmp_path / "page" / "README.md.jinja").write_text("{{ table('mine') }}\n{{ missing() }}\n{{ spent() }}\n")
    rows = '[base]\nseed = 0\nrounds = 5\n[[rows]]\nlabel = "one"\n[[rows]]\nlabel = "two"\nclip_norm = 0.2\n'
    (tmp_path / "mine.toml").write_text(rows)
    assert render_page(tmp_path).text.count("No cell") == 2
    invent(tmp_path, lambda cell: 0.25 if cell.label == "one" else None)
    page = render_page(tmp_path)
    assert re.search(r"^\| one \| [\d.]+ \| 25\.00 \|$", page.text, re.MULTILINE)
    assert "| 5 | `mine` | two | seed = 0 (1 cell) | 1.1 |" in page.text  # a minute, as the other one
    page.write()
    assert render_page(tmp_path).outdated() == []


def test_page__a_folder_without_a_page_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "paper.toml does not exist" in line


def test_order__what_is_not_set_then_numbers_by_size_then_words() -> None:
    points = [["linear", 2], ["cosine", 10], [None, 3], [8, 1], [0.5, math.inf], ["cosine", 9]]
    ordered = sorted(points, key=in_order)
    assert ordered == [[None, 3], [0.5, math.inf], [8, 1], ["cosine", 9], ["cosine", 10], ["linear", 2]]


def test_figure__tells_other_noise_apart_from_dp_fedavg_s(tmp_path: Path) -> None:
    from papers.rendering.document import read_document
    from papers.rendering.figures import _signal_series

    folder = copy_of(CHENG, tmp_path / "papers")
    invent(folder, lambda cell: {"DDGauss": 0.2, "DP-FedAvg": 0.5}.get(cell.label) if cell.table == "table2" else None)
    points = [point for found in _signal_series(read_document(folder), {}).values() for point in found]
    assert {(accuracy, words) for _, accuracy, _, words in points} == {
        (20.0, "DP-FedAvg, ddgauss noise"),
        (50.0, "DP-FedAvg"),
    }
