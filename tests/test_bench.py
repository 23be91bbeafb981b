"""The CPU benchmark's driver: shared inputs survive the file, and what fails or differs is reported."""

from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_task__reads_back_as_it_was_written(tmp_path: Path) -> None:
    from harness.workloads import WORKLOADS
    from peers.task import load_task, save_task

    task = WORKLOADS[1].task()
    save_task(task, tmp_path / "inputs.npz")
    back = load_task(tmp_path / "inputs.npz")
    assert back.names == task.names
    assert back.shapes == task.shapes
    assert np.array_equal(back.plan, task.plan)
    assert np.array_equal(back.flatten(back.weights()), task.start)


def test_system__that_cannot_start_says_why(tmp_path: Path) -> None:
    from harness.environments import Unavailable
    from harness.process import System

    with pytest.raises(Unavailable, match="nobody stopped: .*No module named peers.nobody"):
        System("nobody", tmp_path / "inputs.npz", tmp_path, threads=1)


def test_report__a_failed_system_and_a_different_sum_are_listed_with_the_reason() -> None:
    from harness.measure import Measured, Row, _compare
    from harness.report import make_report, markdown
    from harness.workloads import WORKLOADS

    rows = {
        "loop": Row("loop", seconds=[2.0, 4.0]),
        "ours": Row("ours", seconds=[1.0, 1.0]),
        "pfl": Row("pfl", error="pfl stopped: no wheel"),
        "fedjax": Row("fedjax", seconds=[1.0, 1.0]),
    }
    one = np.ones(4)
    _compare(rows, {"loop": [one, one], "ours": [one, one * (1 + 1e-7)], "pfl": [], "fedjax": [one, one * 1.001]})
    assert rows["ours"].ratio == pytest.approx(0.375)
    assert not rows["ours"].error
    text = markdown(make_report([Measured(WORKLOADS[0], list(rows.values()), others=0.0)], 2, None), "cpu.svg")
    assert "pfl stopped: no wheel" in text
    assert "differs from the loop's by 1.0e-03" in text
    assert "busy" not in text


def test_performance_page__table_is_that_of_the_results_file(tmp_path: Path) -> None:
    from harness.front import BEGIN, END, render_front

    front = BENCHMARKS.parent / "docs/performance.md"
    copy = tmp_path / "performance.md"
    copy.write_text(front.read_text())
    render_front(BENCHMARKS / "results", copy)
    assert copy.read_text() == front.read_text()
    table = front.read_text().split(BEGIN)[1].split(END)[0]
    assert "FedBlur" in table
    assert "CPU cores" in table


def test_pictures__are_drawn_from_the_stored_results(tmp_path: Path) -> None:
    from redraw import redraw

    results = BENCHMARKS / "results"
    redraw(results, tmp_path)
    for name in ("cpu.svg", "scaling.svg"):
        drawn = (tmp_path / name).read_text(encoding="utf-8")
        assert "<svg" in drawn
        assert abs(len(drawn) - len((results / name).read_text(encoding="utf-8"))) < 2000  # fonts may differ
        assert f"results/{name}" in (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert not list(results.glob("*.png"))


def test_noise__table_is_that_of_the_results_file(tmp_path: Path) -> None:
    import json

    import noise

    copy = tmp_path / "README.md"
    copy.write_text((BENCHMARKS / "README.md").read_text())
    results = json.loads((BENCHMARKS / "results" / "noise.json").read_text())
    noise.render(results, copy)
    assert copy.read_text() == (BENCHMARKS / "README.md").read_text()
    assert "CPU cores" in results["machine"]
    assert len(results["rows"]) == len(noise.WAYS) * len(noise.COUNTS) * len(noise.THREADS)


def test_noise__peers_draw_what_they_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    import noise
    from scipy import stats

    from fedblur.core.rng import Seeded

    monkeypatch.setattr(noise, "SCALE", 20.3)
    for draw in (noise.canonne, noise.karney):
        draws = draw(40_000, Seeded.root(1).keystream().lane(0))
        assert len(draws) == 40_000
        assert stats.kstest(draws + np.random.default_rng(0).random(40_000) - 0.5, "norm", (0, 20.3)).pvalue > 1e-3
