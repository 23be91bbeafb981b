"""The page's figures on banded noise are those of the tool that it names, and the tool's algebra is right."""

import math
import runpy
from pathlib import Path

import numpy as np
import pytest

from fedblur.privacy.accounting import calibrate
from fedblur.privacy.events import Gaussian, PoissonSampled

ROOT = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "banded_noise.py"))


def test_banded_noise__page_has_the_tools_table(capsys: pytest.CaptureFixture[str]) -> None:
    TOOL["main"]()
    assert capsys.readouterr().out.strip() in (ROOT / "papers" / "beyond" / "README.md").read_text(encoding="utf-8")


def test_banded_noise__is_the_spread_of_the_servers_sum_over_correlated_draws() -> None:
    weight = np.array([3.0, 4.0])
    alone = calibrate(lambda s: PoissonSampled(0.1, Gaussian(s)), 2, 8.0, TOOL["DELTA"])
    assert TOOL["final_noise"](0.1, 2, 8.0, 1, weight) == pytest.approx(5.0 * alone)  # σ‖weight‖
    paired = calibrate(lambda s: PoissonSampled(0.2, Gaussian(s)), 1, 8.0, TOOL["DELTA"])
    bands = np.array([[1.0, 0.0], [0.5, 1.0]]) / math.sqrt(1.25)
    expected = paired * np.linalg.norm(weight @ np.linalg.inv(bands))
    assert TOOL["final_noise"](0.1, 2, 8.0, 2, weight) == pytest.approx(expected)
    assert math.isnan(TOOL["final_noise"](0.2, 8, 8.0, 8, np.ones(8)))  # groups smaller than the cohort


def test_banded_noise__sums_up_the_servers_own_steps() -> None:
    first, last = TOOL["weights"](50, "linear")[[0, -1]]
    assert first > last > 0  # an early round is carried on by momentum, and the step falls to the end
