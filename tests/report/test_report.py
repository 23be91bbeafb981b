"""`fedblur report`: one file that needs nothing else, says what was measured, and can leave out what is local only."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedblur.experiments.result_store import pack
from fedblur.report.dashboard import LOCAL_ONLY, make_report, render
from fedblur.report.records import find_records, not_begun
from fedblur.training.run_folder import RunFolder
from tests.commandline import invoke
from tests.report.drawing import axis_titles, charts, collisions, points, tips

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--rounds", 6, "--clients", 60, "--sample-rate", 0.3, "--quiet")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "run"
    invoke("run", *SHORT, "--out", path)
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "table"
    invoke("table", ROOT / "examples/quickstart.toml", "--set", "rounds=5", "--out", path, "--quiet")
    return path


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def page_of(*runs: Path, public: bool = False) -> str:
    return render(make_report(find_records(runs), public))


class Outline(HTMLParser):
    """What a page has: elements by name, and what it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.figures: list[str] = []
        self.loads: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "figure":
            self.figures.append(str(found["id"]))
        self.loads += [str(found[key]) for key in ("src", "href", "data", "poster") if found.get(key)]


def test_report__is_one_small_file_that_loads_nothing(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep/page.html"
    assert f"Report: {out}" in invoke("report", run, "--out", out)
    page = out.read_text()
    assert out.stat().st_size < 3_000_000
    assert set(Outline(page).loads) == {"data:,", "#content"}
    assert "default-src &#39;none&#39;" in page
    assert "connect-src &#39;none&#39;" in page
    assert not re.search(r"https?://|@import|url\(", page)


def test_report__goes_into_the_run_folder_unless_told_otherwise(copy: Path) -> None:
    invoke("report", copy)
    assert (copy / "report.html").exists()


def test_report__of_a_run_has_every_chart_with_words_and_numbers(run: Path) -> None:
    page = page_of(run)
    keys = ["by-round", "by-epsilon", "g0-norms", "g0-clipped", "g0-signal", "g0-classes", "g0-clients"]
    assert Outline(page).figures == keys
    for key in keys:
        assert f'aria-labelledby="{key}-title {key}-words"' in page
        assert re.search(rf'id="{key}-words">[^<]{{20,}}', page)
        assert re.search(rf'id="{key}-data">.*?<tbody>\s*<tr><td>', page, re.DOTALL)


def check_charts(page: str) -> None:
    """Each has two axis titles, words under the pointer for all that is drawn, and labels that touch nothing."""
    assert len(charts(page)) == len(Outline(page).figures)
    for chart in charts(page):
        name = chart.attrib["aria-labelledby"]
        assert len(axis_titles(chart)) == 2, name
        assert all(axis_titles(chart)), name
        assert len(tips(chart)) >= points(chart) >= 1, name
        assert all(re.search(r"\d", tip) for tip in tips(chart)), name
        assert not collisions(chart), name


def test_report__axes_have_titles_charts_show_values_and_labels_touch_nothing(run: Path, table: Path) -> None:
    for path in (run, table):
        check_charts(page_of(path))
    titles = {title for chart in charts(page_of(run)) for title in axis_titles(chart)}
    assert {"held-out accuracy (%)", "norm of an update (ℓ2)", "accuracy on own samples (%)", "round"} <= titles


def test_report__captions_leave_the_numbers_to_charts_and_tables(table: Path) -> None:
    for caption in re.findall(r'class="words" id="[\w-]+">([^<]*)', page_of(table)):
        assert len(re.findall(r"\d+(?:\.\d+)?(?= %| times)", caption)) <= 1, caption
        assert caption.rstrip().endswith(".")


def test_report__shows_what_the_run_recorded(run: Path) -> None:
    page, rows = page_of(run), RunFolder(run).read_rounds()
    summary = json.loads(RunFolder(run).summary.read_text())
    assert f"{100 * summary['accuracy']:.1f} %" in page
    assert f"<td>6</td><td>{rows[-1]['local_only']['norm_quantiles'][0]:.3g}</td>" in page
    assert json.loads((run / "statement.json").read_text())["ledger"]["head"] in page
    assert "ε = 2.000 at δ = 0.0167 (PLD; RDP" in page
    assert "local.learning_rate" in page


def test_report__public_is_the_same_page_whatever_the_local_only_figures_are(run: Path, copy: Path) -> None:
    changed = [row | {"seconds": 99.0, "local_only": {"clipped_share": 0.77}} for row in RunFolder(copy).read_rounds()]
    RunFolder(copy).rounds.write_text("".join(json.dumps(row) + "\n" for row in changed))
    summary = RunFolder(copy).read_summary()
    RunFolder(copy).write_summary(replace(summary, seconds=99.0, local_only={"clipped_share": 0.77}))
    pages = [re.sub(r"statement made [^<]*", "", page_of(path, public=True)) for path in (run, copy)]
    assert pages[0] == pages[1]
    assert Outline(pages[0]).figures == ["by-round", "by-epsilon"]
    assert LOCAL_ONLY not in pages[0]
    facts = [json.loads(invoke("report", p, "--public", "--json", "--out", copy / "p.html")) for p in (run, copy)]
    assert facts[0] == facts[1]


def test_report__marks_every_chart_that_no_noise_protects(run: Path) -> None:
    figures = re.findall(r'<figure class="card" id="([\w-]+)".*?</figcaption>', page_of(run), re.DOTALL)
    marked = re.findall(
        rf'<figure class="card" id="([\w-]+)"[^>]*>\s*<figcaption>\s*<h3[^<]*</h3>\s*<p class="badge">{LOCAL_ONLY}',
        page_of(run),
    )
    assert set(figures) - set(marked) == {"by-round", "by-epsilon"}


def test_report__of_a_table_compares_its_rows_over_seeds(table: Path) -> None:
    found = json.loads(invoke("report", table, "--json"))
    first, second, third = found["groups"]
    names = [first["label"], second["label"], third["label"]]
    assert names == ["DP-FedAvg", "DP-FedAvg + BLUR + LUS", "recipe, untuned"]
    assert first["seeds"] == second["seeds"] == second["versus"]["n"] == third["versus"]["n"] == 3
    assert second["versus"]["baseline"] == third["versus"]["baseline"] == "DP-FedAvg"
    assert second["versus"]["difference"] == pytest.approx(second["accuracy"] - first["accuracy"])
    page = (table / "report.html").read_text()
    assert f"{first['accuracy']:.2f} ± {first['spread']:.2f}" in page
    assert "All 9 runs on these clients together: ε = ∞, since 9 runs drew the noise from a seed" in page
    assert "NOT PRIVATE: seeded." in page
    assert len(Outline(page).figures) == 3 + 3 * 5


def test_report__of_a_table_keeps_its_title_and_the_order_of_rows_and_axes(tmp_path: Path) -> None:
    rows = "".join(f'[[rows]]\nlabel = "{name}"\nclip_norm = {norm}\n' for name, norm in [("z", 0.2), ("a", 0.1)])
    axes = "[axes]\nsample_rate = [0.5, 0.3]\nepsilon = [8, 2]\nseed = [0]\n"
    spec = tmp_path / "order.toml"
    spec.write_text(f'title = "Clip norms & rates"\n[base]\nrounds = 2\nclients = 40\n{axes}{rows}')
    invoke("table", spec, "--out", tmp_path / "out", "--quiet")
    report = make_report(find_records([tmp_path / "out"]))
    assert report.title == "Clip norms & rates"
    assert "<h1>Clip norms &amp; rates</h1>" in render(report)
    assert [group.name for group in report.groups] == [
        f"{label}, sample_rate = {rate}, epsilon = {epsilon}"
        for label in "za" for rate in (0.5, 0.3) for epsilon in (8, 2)
    ]  # fmt: skip


def test_report__of_a_table_draws_its_metric_over_epsilon_and_counts_what_is_left(tmp_path: Path) -> None:
    spec = tmp_path / "budgets.toml"
    rows = 'label = "a"\n[[rows]]\nlabel = "b"\nclip_norm = 0.5\n'
    rows += '[[rows]]\nlabel = "no noise"\nepsilon = inf\naxes = { seed = [0] }\n'
    base = 'title = "Budgets"\nresults = "kept"\n[base]\nrounds = 2\nclients = 40\n'
    spec.write_text(f"{base}[axes]\nepsilon = [2, 8]\nseed = [0, 1]\n[[rows]]\n{rows}")
    out = tmp_path / "out"
    invoke("table", spec, "--out", out, "--quiet", "--only", "a |")
    records, waiting = find_records([out]), not_begun([out])
    assert [record.label for record in records] == ["a"] * 4  # though its results lie elsewhere
    assert len(waiting) == 5
    report = make_report(records, waiting=waiting.values())
    assert (report.title, report.status) == ("Budgets", "4 of 9 cells done, round 8 of 18")
    assert report.progress == (8, 18)
    assert '<progress value="8" max="18"' in render(report)
    invoke("table", spec, "--out", out, "--quiet")
    pack(tmp_path / "kept")
    assert not not_begun([out])
    report = make_report(find_records([out]))
    assert (report.status, report.progress) == ("Complete", None)
    figure = next(figure for figure in report.figures if figure.key == "over-epsilon")
    assert figure.title == "Accuracy over ε"
    assert [name for _, name in figure.legend] == ["a", "b", "no noise"]
    assert [row[:2] for row in figure.rows] == [["a", "2"], ["a", "8"], ["b", "2"], ["b", "8"], ["no noise", "–"]]
    means = [line.mean for line in report.lines]
    assert [row[2] for row in figure.rows] == [f"{mean:.2f}" for mean in means]


def test_report__of_results_alone_says_that_the_ledger_is_elsewhere(table: Path, tmp_path: Path) -> None:
    shutil.copytree(table / "results", tmp_path / "kept/results")
    page = page_of(tmp_path / "kept")
    assert "Only this run&#39;s result is here, not its ledger" in page
    assert set(Outline(page).figures) == {"by-round", "by-epsilon", "ends"}  # what was given to others holds no norms
    shutil.copytree(table / "results-local-only", tmp_path / "kept/results-local-only")
    page = page_of(tmp_path / "kept")
    assert {"by-round", "ends", "g0-norms", "g1-clipped"} <= set(Outline(page).figures)
    pack(tmp_path / "kept/results")
    assert page_of(tmp_path / "kept") == page


def test_report__of_a_run_that_goes_on_shows_what_there_is(copy: Path) -> None:
    RunFolder(copy).summary.unlink()
    rows = RunFolder(copy).rounds.read_text().splitlines(keepends=True)
    RunFolder(copy).rounds.write_text("".join(rows[:3]) + '{"round": 4, "eps')
    page = page_of(copy)
    assert '<p class="status">round 3 of 6</p>' in page
    assert '<progress value="3" max="6"' in page
    assert "spent by round 3" in page
    assert "The run has not ended" in page
    RunFolder(copy).rounds.unlink()
    assert "No round has been evaluated yet" in page_of(copy)


def test_report__of_a_stopped_run_says_so(copy: Path) -> None:
    summary = RunFolder(copy).read_summary()
    RunFolder(copy).write_summary(replace(summary, status="stopped after 4 of 6 rounds"))
    assert "stopped after 4 of 6 rounds" in page_of(copy)


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (("--method", "fedavg"), {"by-epsilon", "g0-signal"}),
        (("--set", "clipping=adaptive"), set()),
        (
            (
                "--method",
                "ae-dpfl",
                "--set",
                "method.ae-dpfl.student_steps=20",
                "--set",
                "method.ae-dpfl.teacher_steps=5",
            ),
            {"g0-norms", "g0-clipped", "g0-signal"},
        ),
    ],
    ids=["no noise", "adaptive", "voting"],
)
def test_report__of_other_kinds_of_runs_draws_what_they_have(
    flags: tuple[object, ...], missing: set[str], tmp_path: Path
) -> None:
    invoke("run", *SHORT, *flags, "--out", tmp_path / "run")
    check_charts(page_of(tmp_path / "run"))
    figures = set(Outline(page_of(tmp_path / "run")).figures)
    keys = {"by-round", "by-epsilon", "g0-norms", "g0-clipped", "g0-signal", "g0-classes", "g0-clients"}
    assert keys - figures == missing


def test_report__of_a_released_winner_has_nothing_that_is_local_only(copy: Path) -> None:
    rows = [
        {k: v for k, v in row.items() if k not in ("local_only", "epsilon")} for row in RunFolder(copy).read_rounds()
    ]
    RunFolder(copy).rounds.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Outline(page_of(copy)).figures == ["by-round"]


def test_report__runs_of_one_method_are_told_apart_by_their_settings(run: Path, tmp_path: Path) -> None:
    invoke("run", *SHORT, "--set", "clip_norm=0.3", "--out", tmp_path / "other")
    names = [group.name for group in make_report(find_records([run, tmp_path / "other"])).groups]
    assert names == ["DP-FedAvg (clip_norm = 0.1)", "DP-FedAvg (clip_norm = 0.3)"]


def test_report__names_are_text_and_never_markup(copy: Path) -> None:
    shutil.move(copy, copy.with_name("<script>alert(1)<script>"))
    page = page_of(copy.with_name("<script>alert(1)<script>"), copy.parent)
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere", "does not exist; give a run folder"), ("empty", "holds no run: it has no config.json")],
)
def test_report__says_what_it_needs(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert words in " ".join(invoke("report", tmp_path / name, status=2).split())


def test_report__a_command_that_never_draws_or_compiles_loads_neither_matplotlib_nor_the_compiler() -> None:
    code = (
        "import sys, fedblur.cli.app, fedblur.cli.data\n"
        "import fedblur.report.plots, fedblur.report.dashboard, fedblur.report.serving\n"
        "assert not {'matplotlib', 'torch._dynamo'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
