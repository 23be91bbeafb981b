"""From a table's results to a paper: `fedblur.load`, `fedblur results --format`, `fedblur plot`."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from scipy import stats

import fedblur
from fedblur.experiments.result_store import local_only_folder, pack
from tests.commandline import invoke
from tests.report.invented import figure, invent

SHOWN = {"plain", "BLUR_50 %", "without noise"}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return invent(tmp_path_factory.mktemp("paper"))


@pytest.fixture(scope="module")
def rmse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table whose headline is an error: lower is better."""
    return invent(tmp_path_factory.mktemp("rmse"), lambda cell: {"rmse": 2.0 - figure(cell)})


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


# --- results ---


def test_results__csv_has_means_their_errors_and_paired_differences(table: Path) -> None:
    rows = rows_of(invoke("results", table, "--format", "csv", "--baseline", "plain"))
    assert [(row["label"], row["epsilon"]) for row in rows] == [
        ("plain", "2.0"), ("plain", "8.0"), ("BLUR_50 %", "2.0"), ("BLUR_50 %", "8.0"), ("without noise", ""),
    ]  # fmt: skip
    blur = [0.56 + 0.011 * seed for seed in range(3)]
    row = rows[2]
    assert float(row["accuracy"]) == pytest.approx(statistics.mean(blur))
    assert float(row["accuracy_standard_error"]) == pytest.approx(statistics.stdev(blur) / 3**0.5)
    gaps = [0.02, 0.021, 0.022]
    low, high = stats.t.interval(0.95, 2, statistics.mean(gaps), statistics.stdev(gaps) / 3**0.5)
    assert float(row["accuracy_difference"]) == pytest.approx(0.021)
    assert float(row["accuracy_difference_standard_error"]) == pytest.approx(statistics.stdev(gaps) / 3**0.5)
    assert float(row["accuracy_difference_low"]) == pytest.approx(low)
    assert float(row["accuracy_difference_high"]) == pytest.approx(high)
    assert (row["accuracy_pairs"], row["accuracy_baseline"]) == ("3", "plain, epsilon = 2")
    assert rows[0]["accuracy_difference"] == ""
    assert [row["not_private"] for row in rows] == ["seeded"] * 4 + ["no noise"]


def test_results__a_baseline_without_the_axis_stands_for_all_of_it(table: Path) -> None:
    rows = rows_of(invoke("results", table, "--format", "csv", "--baseline", "without noise"))
    assert [row["accuracy_baseline"] for row in rows] == ["without noise"] * 4 + [""]
    assert "did you mean 'plain'?" in invoke("results", table, "--format", "csv", "--baseline", "plan", status=2)


@pytest.mark.parametrize("form", ["csv", "markdown", "latex", "json"])
def test_results__export_holds_nothing_that_is_local_only(form: str, table: Path, tmp_path: Path) -> None:
    """Other diagnostics, the same text: also where the files of an earlier version hold them."""
    other = invent(tmp_path, local=0.25)
    for path in (other / "results").iterdir():
        kept = json.loads(path.read_text())
        kept |= json.loads((local_only_folder(other / "results") / path.name).read_text())
        del kept["digest"]
        path.write_text(json.dumps(kept))
    assert "0.25" in path.read_text()
    options = ("--format", form, "--baseline", "plain", "--metric", "accuracy", "--metric", "loss")
    assert invoke("results", other, *options) == invoke("results", table, *options)


def test_results__json_and_markdown_mark_what_is_not_private(table: Path) -> None:
    found = json.loads(invoke("results", table, "--format", "json"))
    assert found["title"] == "Budgets & 100 % of it_all"
    assert {row["not_private"] for row in found["rows"]} == {"seeded", "no noise"}
    text = invoke("results", table, "--format", "markdown")
    assert "| plain† | 2 | 55.00 ± 0.58 | 3 | 2 |" in text
    assert "| without noise‡ | – | 81.00 ± 0.58 | 3 | ∞ |" in text
    assert "† NOT PRIVATE: seeded; anyone with the seed can regenerate the noise" in text


def test_results__latex_compiles_as_it_is(table: Path, tmp_path: Path) -> None:
    text = invoke("results", table, "--format", "latex", "--baseline", "plain")
    assert text.startswith(r"% needs \usepackage{booktabs}")
    assert r"\caption{Budgets \& 100 \% of it\_all}" in text
    assert r"BLUR\_50 \%$^{\dagger}$ & 2 & 57.10 $\pm$ 0.64 & $+$2.10 $\pm$ 0.06 & [$+$1.85, $+$2.35]" in text
    whole = invoke("results", table, "--format", "latex", "--baseline", "plain", "--standalone")
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed (apt-get install texlive-latex-recommended)")
    included = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\\input{table}\\end{document}"
    (tmp_path / "table.tex").write_text(text)
    for name, source in (("whole", whole), ("included", included)):
        (tmp_path / f"{name}.tex").write_text(source)
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", f"{name}.tex"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout[-2000:]
        assert "Overfull" not in run.stdout


def test_results__of_another_metric_never_say_accuracy(rmse: Path) -> None:
    for form in ("csv", "markdown", "latex", "json"):
        text = invoke("results", rmse, "--format", form, "--baseline", "plain")
        assert "rmse" in text.lower()
        assert "accuracy" not in text
    assert "| BLUR_50 %† | 2 | 1.429 ± 0.006 | -0.021 ± 0.001 | [-0.023, -0.019] | 3 | 2 |" in invoke(
        "results", rmse, "--format", "markdown", "--baseline", "plain"
    )
    assert "accuracy" not in invoke("results", rmse)
    message = invoke("results", rmse, "--format", "csv", "--metric", "accuracy", status=2)
    assert "metric 'accuracy' was not measured in these runs" in message


def test_results__options_that_do_not_fit_are_refused(table: Path) -> None:
    assert "--baseline belongs to --format" in invoke("results", table, "--baseline", "plain", status=2)
    assert "did you mean 'csv'?" in invoke("results", table, "--format", "cvs", status=2)
    assert "--standalone is for --format latex" in " ".join(
        invoke("results", table, "--format", "csv", "--standalone", status=2).split()
    )


# --- load ---


def test_load__of_a_table_is_a_frame_of_its_cells_and_their_rounds(table: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed (pip install pandas)")
    found = fedblur.load(table)
    assert len(found) == 15
    assert list(found.columns[:5]) == ["label", "epsilon", "seed", "accuracy", "loss"]
    means = found.groupby(["label", "epsilon"])["accuracy"].mean()
    assert means["plain", 2.0] == pytest.approx(0.55)
    assert set(found["not_private"]) == {"seeded", "no noise"}
    assert (found["delta"] == 0.01).all()
    long = found.rounds
    assert len(long) == 30
    assert {"label", "epsilon", "seed", "round", "accuracy", "loss", "epsilon_spent"} <= set(long.columns)
    assert not [name for frame in (found, long) for name in frame.columns if "local_only" in name or "seconds" in name]
    assert not hasattr(found[found["seed"] == 0], "rounds")  # what is computed from it is a plain frame
    everything = fedblur.load(table, local_only=True)
    assert (everything["local_only.clipped_share"] == 0.5).all()


def test_load__of_results_that_were_packed_and_sent_is_the_same_frame(table: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed (pip install pandas)")
    shutil.copytree(table / "results", tmp_path / "results")
    (packed,) = pack(tmp_path / "results")
    pandas.testing.assert_frame_equal(fedblur.load(packed), fedblur.load(table))
    pandas.testing.assert_frame_equal(fedblur.load(packed).rounds, fedblur.load(table).rounds)


def test_load__of_a_run_has_rounds_summary_config_claim_and_model(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed (pip install pandas)")
    run = fedblur.train(fedblur.Config(rounds=3, clients=40, epsilon=4.0), out=tmp_path / "run")
    found = fedblur.load(tmp_path / "run")
    assert found.summary == run.record
    assert found.claim == run.record.privacy
    assert found.config["rounds"] == 3
    assert list(found.rounds["round"]) == [1, 2, 3]
    assert found.rounds["accuracy"].iloc[-1] == pytest.approx(run.accuracy)
    assert not [name for name in found.rounds if "local_only" in name or "seconds" in name]
    assert "local_only.clipped_share" in fedblur.load(tmp_path / "run", local_only=True).rounds
    run.module.load_state_dict(found.model)


def test_load__without_pandas_is_one_line(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fedblur.FedBlurError, match="pip install pandas"):
        fedblur.load(table)


# --- plot ---


def test_plot__draws_one_line_a_label_over_epsilon_with_errors_over_seeds(table: Path, tmp_path: Path) -> None:
    words = invoke("plot", table, "--out", tmp_path / "f.svg")
    assert "means over seeds, bars of one standard error" in words
    assert "NOT PRIVATE: seeded (plain, BLUR_50 %)." in words
    assert "NOT PRIVATE: no noise (without noise)." in words
    drawn = (tmp_path / "f.svg").read_text()
    assert all(f">{label}<" in drawn for label in SHOWN)
    assert ">held-out accuracy (%)<" in drawn
    assert ">ε<" in drawn
    assert "seeded" in drawn  # in the file's own description
    invoke("plot", table, "--out", tmp_path / "g.svg")
    assert (tmp_path / "g.svg").read_text() == drawn


def labels_below(drawn: str) -> list[str]:
    """Return the labels of the horizontal axis of an SVG."""
    axis = drawn.partition('id="matplotlib.axis_1"')[2].partition('id="matplotlib.axis_2"')[0]
    return [label for label in re.findall(r">([^<>]+)</text>", axis) if label != "round"]


@pytest.mark.parametrize("over", ["round", "epsilon_spent"])
def test_plot__by_round_names_another_metric(over: str, rmse: Path, tmp_path: Path) -> None:
    invoke("plot", rmse, "--out", tmp_path / "f.svg", "--over", over, "--columns", 2, "--only", "plain")
    drawn = (tmp_path / "f.svg").read_text()
    assert ">held-out RMSE<" in drawn
    assert over != "round" or set(labels_below(drawn)) <= {"1", "2", "3", "4", "5"}
    assert "accuracy" not in drawn
    assert ">without noise<" not in drawn


def test_plot__pdf_embeds_truetype_letters_and_sizes_are_those_of_columns(table: Path, tmp_path: Path) -> None:
    for columns, width in ((1, 3.4), (2, 7.0)):
        invoke("plot", table, "--out", tmp_path / "f.pdf", "--columns", columns)
        data = (tmp_path / "f.pdf").read_bytes()
        assert b"/Type3" not in data
        assert f"/MediaBox [ 0 0 {72 * width:g}".encode() in data


def test_plot__colours_differ_in_grey_and_lines_without_colour() -> None:
    from fedblur.report.result_plot import COLOURS, DASHES, MARKERS

    assert len(set(COLOURS)) == len(set(map(str, DASHES))) == len(set(MARKERS)) == 8


def test_plot__what_cannot_be_drawn_is_refused(table: Path, tmp_path: Path) -> None:
    assert "the name must end in" in invoke("plot", table, "--out", tmp_path / "f.jpg", status=2)
    assert "--over 'epsilom'" in invoke("plot", table, "--out", tmp_path / "f.pdf", "--over", "epsilom", status=2)
    assert "is no label here" in invoke("plot", table, "--out", tmp_path / "f.pdf", "--only", "x", status=2)
    assert "columns=3 must be 1 or 2" in invoke("plot", table, "--out", tmp_path / "f.pdf", "--columns", 3, status=2)
