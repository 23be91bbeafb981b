"""What to expect of a setting: the published ratios, and advice that is computed."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from fedblur.core.errors import ConfigError, PrivacyError
from fedblur.privacy.accounting import calibrate
from fedblur.privacy.events import Gaussian, PoissonSampled
from fedblur.privacy.planning import PAPER_CNN, Setting, expectation, outlook, plan_of, signal_to_noise

EMNIST = Setting(3400, 0.04, 1000, epsilon=2.0)
RESNET_EMNIST, RESNET_CIFAR, CNN_CIFAR = 11_199_486, 11_173_962, 1_405_258

# (N, σ PLD, noise over S for the CNN, R for the CNN, noise over S for ResNet-18, R for ResNet-18)
CIFAR = [
    (100, 1.363, 269.4, 0.06, 760, 0.02), (100, 0.951, 187.8, 0.09, 530, 0.03),
    (100, 0.795, 157.0, 0.11, 443, 0.04), (100, 0.708, 139.8, 0.12, 394, 0.04),
    (500, 1.602, 63.3, 0.27, 179, 0.10), (500, 1.067, 42.1, 0.41, 119, 0.15),
    (500, 0.875, 34.6, 0.50, 97, 0.18), (500, 0.771, 30.5, 0.57, 86, 0.20),
    (1000, 1.699, 33.6, 0.52, 95, 0.18), (1000, 1.113, 22.0, 0.79, 62, 0.28),
    (1000, 0.907, 17.9, 0.97, 51, 0.34), (1000, 0.796, 15.7, 1.10, 44, 0.39),
    (5000, 1.912, 7.6, 2.29, 21, 0.81), (5000, 1.214, 4.8, 3.61, 14, 1.28),
    (5000, 0.975, 3.9, 4.49, 11, 1.59), (5000, 0.849, 3.4, 5.16, 9, 1.83),
    (10000, 1.999, 3.9, 4.39, 11, 1.56), (10000, 1.256, 2.5, 6.98, 7, 2.48),
    (10000, 1.003, 2.0, 8.74, 6, 3.10), (10000, 0.871, 1.7, 10.06, 5, 3.57),
]  # fmt: skip
PUBLISHED = [
    (Setting(3400, 0.04, 1000, noise_multiplier=sigma, parameters=d, clip_norm=0.03), over, ratio)
    for sigma, cnn, resnet in [
        (2.178, (16.2, 1.96), (54, 0.59)), (1.348, (10.0, 3.16), (33, 0.95)),
        (1.068, (7.9, 3.99), (26, 1.20)), (0.924, (6.9, 4.61), (23, 1.39)),
    ]
    for d, (over, ratio) in ((PAPER_CNN, cnn), (RESNET_EMNIST, resnet))
] + [
    (Setting(n, 0.06, 300, noise_multiplier=sigma, parameters=d, clip_norm=0.3), over, ratio)
    for n, sigma, cnn_over, cnn, resnet_over, resnet in CIFAR
    for d, over, ratio in ((CNN_CIFAR, cnn_over, cnn), (RESNET_CIFAR, resnet_over, resnet))
]  # fmt: skip


@pytest.mark.parametrize(("setting", "over", "ratio"), PUBLISHED)
def test_ratio__published_noise_and_signal(setting: Setting, over: float, ratio: float) -> None:
    sigma = setting.noise_multiplier or 0.0
    plan = replace(plan_of(replace(setting, noise_multiplier=1.0), "rdp"), noise_multiplier=sigma)
    printed = 5.1e-4 / sigma  # σ is printed to three digits
    found = signal_to_noise(plan, setting.parameters)
    assert found == pytest.approx(ratio, abs=0.0051 + printed * ratio)
    digit = 0.051 if setting.parameters < 2e6 else 0.51
    assert math.sqrt(plan.rounds) / found == pytest.approx(over, abs=digit + printed * over)  # σ√d/(pN)


def test_outlook__the_papers_setting() -> None:
    answer = outlook(replace(EMNIST, clip_norm=0.03))
    table = answer.as_dict()
    assert table["noise_multiplier"]["pld"] == pytest.approx(2.178, rel=5e-3)
    assert table["noise_multiplier"]["rdp"] == pytest.approx(2.382, rel=5e-3)
    assert table["epsilon"] == {"pld": 2.0, "rdp": 2.0}
    assert table["expected_cohort"] == pytest.approx(136)
    assert table["cohort_spread"] == pytest.approx(11.4, abs=0.05)
    assert table["noise_norm"] == pytest.approx(0.48, abs=0.005)
    assert table["signal_to_noise"]["pld"] == pytest.approx(1.96, abs=0.005)
    assert table["adjacency"] == "add or remove one client"
    assert answer.advice[0].startswith("R = 1.96: weak")


def test_outlook__advice_is_computed() -> None:
    advice = "\n".join(outlook(EMNIST).advice)
    doubled = calibrate(lambda s: PoissonSampled(0.08, Gaussian(s)), 1000, 2.0, 1 / 3400)
    ratio = math.sqrt(1000) * 272 / (doubled * math.sqrt(PAPER_CNN))
    assert f"twice the clients per round (sample_rate=0.08): R = {ratio:.2f}" in advice
    assert "a tenth the size (101,817 parameters): R = 6.19 (+216 %" in advice
    assert "rounds=250): R = 2.0" in advice
    assert "twice the clients in all (6,800): R = " in advice
    assert "N^-1.1 = 0.00013 needs sigma 2.302 (+5.7 %)" in advice


def test_outlook__from_a_noise_multiplier() -> None:
    answer = outlook(replace(EMNIST, epsilon=None, noise_multiplier=2.178))
    table = answer.as_dict()
    assert table["epsilon"]["pld"] == pytest.approx(2.0, rel=1e-3)
    assert table["epsilon"]["pld"] < table["epsilon"]["rdp"]
    assert table["noise_multiplier"] == {"pld": 2.178, "rdp": 2.178}
    assert any("twice the clients per round" in line for line in answer.advice)


def test_outlook__fixed_size_has_rdp_only_and_says_why() -> None:
    answer = outlook(replace(EMNIST, sampling="fixed"))
    assert set(answer.plans) == {"rdp"}
    assert answer.as_dict()["noise_multiplier"]["pld"] is None
    assert answer.as_dict()["adjacency"] == "replace one client"
    assert any("no PLD bound" in line for line in answer.advice)


def test_outlook__full_participation() -> None:
    answer = outlook(replace(EMNIST, sampling="full", sample_rate=1.0))
    assert answer.tightest.noise_multiplier == pytest.approx(50.7, abs=0.05)
    assert not any("per round" in line for line in answer.advice)


def test_outlook__no_noise() -> None:
    for setting in (replace(EMNIST, epsilon=math.inf), replace(EMNIST, epsilon=None, noise_multiplier=0.0)):
        answer = outlook(setting)
        assert answer.as_dict()["epsilon"] == {"pld": math.inf, "rdp": math.inf}
        assert answer.signal_to_noise("pld") == math.inf
        assert answer.advice == ("No noise: nothing limits learning but clipping, and nobody is protected.",)


def test_outlook__so_much_noise_that_epsilon_is_zero() -> None:
    answer = outlook(Setting(100, 0.1, 1, noise_multiplier=1e5))
    assert answer.as_dict()["epsilon"] == {"pld": 0.0, "rdp": 0.0}
    assert "exceeds the largest possible signal" in answer.advice[0]


@pytest.mark.parametrize(
    ("setting", "warning"),
    [
        (Setting(100, 0.005, 10, noise_multiplier=1.0), r"p·N = 0.5 is below 1"),
        (Setting(3400, 0.01, 100, epsilon=8.0), r"sigma = 0.408 is below 0.5: .* epsilon = [\d.]+ there"),
        (
            Setting(1000, 0.1, 10, epsilon=1.0, delta=0.01),
            r"delta = 0.01 is not below 1/N: it permits releasing",
        ),
    ],
)
def test_outlook__warns(setting: Setting, warning: str) -> None:
    assert any(re.search(warning, line) for line in outlook(setting).advice)


def test_outlook__a_small_delta_needs_no_warning() -> None:
    assert not any("1/N" in line for line in outlook(replace(EMNIST, delta="N^-1.1")).advice)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(0.5, "may learn all the same"), (1.0, "weak"), (2.0, "learnable"), (5.0, "comfortable"), (9, "R = 9.00")],
)
def test_expectation__in_plain_words(ratio: float, words: str) -> None:
    assert words in expectation(ratio)


def test_outlook__comfortable_settings_need_no_help() -> None:
    advice = outlook(replace(EMNIST, parameters=10_000, delta="N^-1.1")).advice
    assert len(advice) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": None}, "exactly one of epsilon and noise_multiplier"),
        ({"noise_multiplier": 1.0}, "exactly one of epsilon and noise_multiplier"),
        ({"epsilon": None, "noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"rounds": 0}, "rounds=0 must be 1 or more"),
        ({"parameters": 0}, "parameters=0 must be 1 or more"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be above 0"),
        ({"sample_rate": 1.3}, r"sample_rate=1.3 must be in \(0, 1\]"),
        ({"clients": 0}, "clients=0"),
        ({"epsilon": -2.0}, "epsilon=-2.0 must be above 0"),
        ({"delta": "2"}, "delta=2 must be in"),
        ({"sampling": "poison"}, "did you mean 'poisson'"),
    ],
)
def test_setting__nonsense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        outlook(replace(EMNIST, **changes))  # type: ignore[arg-type]


def test_outlook__out_of_reach_for_all_accountants_is_refused() -> None:
    with pytest.raises(PrivacyError, match="next to no noise"):
        outlook(replace(EMNIST, epsilon=1e12))
