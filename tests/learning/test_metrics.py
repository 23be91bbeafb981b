"""Metrics against scikit-learn, torchmetrics and sums by hand; NaN is the worst; every metric adds over chunks."""

from __future__ import annotations

import math

import pytest
import sklearn.metrics
import torch
from torch import Tensor

import fedblur
from fedblur.core.errors import ConfigError
from fedblur.core.registry import build, describe, parts
from fedblur.learning.metrics import Metric
from tests.commandline import forgotten_parts

DRAW = torch.Generator().manual_seed(0)
CLASSES = torch.randint(0, 5, (300,), generator=DRAW)
LOGITS = torch.randn(300, 5, generator=DRAW) + 1.5 * torch.nn.functional.one_hot(CLASSES, 5)
YES = torch.randint(0, 2, (300,), generator=DRAW)
SCORES = torch.randn(300, 1, generator=DRAW) + YES[:, None]
LABELS = torch.randint(0, 2, (300, 3), generator=DRAW)
MANY = torch.randn(300, 3, generator=DRAW) + LABELS
NUMBERS = torch.randn(300, generator=DRAW)
GUESSES = NUMBERS[:, None] + 0.3 * torch.randn(300, 1, generator=DRAW)
TOKENS = torch.where(torch.rand(300, 4, generator=DRAW) < 0.3, -100, torch.randint(0, 5, (300, 4), generator=DRAW))
TEXT = torch.randn(300, 4, 5, generator=DRAW)


def figure(metric: object, outputs: Tensor, targets: Tensor) -> float:
    """Measure in three chunks."""
    part: Metric = build("metric", metric)
    part.check(outputs[:2], targets)
    counted = [part.count(o, t) for o, t in zip(outputs.split(128), targets.split(128), strict=True)]
    return part.value(torch.cat(counted) if part.keeps_rows else torch.stack(counted).sum(0))


def ranks() -> Tensor:
    return 1 + (LOGITS.gather(1, CLASSES[:, None]) < LOGITS).sum(1)


def nats() -> float:
    real = TOKENS >= 0
    return float(torch.nn.functional.cross_entropy(TEXT[real].double(), TOKENS[real]))


def oracles() -> dict[str, tuple[object, Tensor, Tensor, float]]:
    guess, sk = LOGITS.argmax(1), sklearn.metrics
    return {
        "accuracy": ("accuracy", LOGITS, CLASSES, sk.accuracy_score(CLASSES, guess)),
        "accuracy, binary": ("accuracy", SCORES, YES, sk.accuracy_score(YES, SCORES[:, 0] > 0)),
        "accuracy, labels": ("accuracy", MANY, LABELS, float(((MANY > 0) == (LABELS > 0)).double().mean())),
        "accuracy, tokens": (
            "accuracy", TEXT, TOKENS, sk.accuracy_score(TOKENS[TOKENS >= 0], TEXT.argmax(-1)[TOKENS >= 0])
        ),
        "top 2": ({"name": "top_k", "k": 2}, LOGITS, CLASSES, sk.top_k_accuracy_score(CLASSES, LOGITS, k=2)),
        "f1, macro": ("f1", LOGITS, CLASSES, sk.f1_score(CLASSES, guess, average="macro")),
        "f1, labels": ("f1", MANY, LABELS, sk.f1_score(LABELS, MANY > 0, average="macro")),
        "f1, micro": ({"name": "f1", "average": "micro"}, MANY, LABELS, sk.f1_score(LABELS, MANY > 0, average="micro")),
        "auroc, binary": ("auroc", SCORES, YES, sk.roc_auc_score(YES, SCORES[:, 0])),
        "auroc, labels": ("auroc", MANY, LABELS, sk.roc_auc_score(LABELS, MANY)),
        "auroc, classes": ("auroc", LOGITS, CLASSES, sk.roc_auc_score(CLASSES, LOGITS.softmax(1), multi_class="ovr")),
        "rmse": ("rmse", GUESSES, NUMBERS, sk.root_mean_squared_error(NUMBERS, GUESSES[:, 0])),
        "mae": ("mae", GUESSES, NUMBERS, sk.mean_absolute_error(NUMBERS, GUESSES[:, 0])),
        "perplexity": ("perplexity", TEXT, TOKENS, math.exp(nats())),
        "hit rate": ({"name": "hit_rate", "k": 2}, LOGITS, CLASSES, float((ranks() <= 2).double().mean())),
        "ndcg": (
            {"name": "ndcg", "k": 3}, LOGITS, CLASSES,
            sk.ndcg_score(torch.nn.functional.one_hot(CLASSES, 5), LOGITS, k=3),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", oracles())
def test_metric__agrees_with_another_library(name: str) -> None:
    metric, outputs, targets, expected = oracles()[name]
    assert figure(metric, outputs, targets) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", oracles())
def test_metric__a_prediction_that_is_nan_counts_as_the_worst(name: str) -> None:
    """Whatever the targets: better than none of them, and all NaN is the worst figure there is."""
    metric, outputs, targets, _ = oracles()[name]
    part: Metric = build("metric", metric)
    some, none = outputs.clone(), torch.full_like(outputs, math.nan)
    some[:30] = math.nan
    assert part.score(figure(metric, some, targets)) < part.score(figure(metric, outputs, targets))
    assert part.score(figure(metric, none, targets)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", sorted(parts("metric")))
def test_metric__scores_are_between_0_and_1_and_larger_is_better(name: str) -> None:
    metric: Metric = build("metric", name)
    figures = [math.inf, 5.0, 1.0, 0.5, 0.0, -1.0, -math.inf]
    assert all(0 <= metric.score(value) <= 1 for value in figures)
    assert metric.score(math.nan) == 0
    assert metric.score(metric.best) == 1
    assert metric.score(metric.worst) == 0
    near, far = (0.9, 0.1) if metric.larger_is_better else (metric.best + 0.1, metric.best + 0.9)
    assert metric.score(near) > metric.score(far)
    assert build("metric", describe(metric)) == metric


@pytest.mark.parametrize(
    ("metric", "outputs", "targets"),
    [
        ("accuracy", GUESSES, NUMBERS),
        ("f1", GUESSES, NUMBERS),
        ("auroc", GUESSES, NUMBERS),
        ("rmse", LOGITS, NUMBERS),
        ("ndcg", GUESSES, NUMBERS),
        ("perplexity", SCORES, YES),
    ],
)
def test_metric__refuses_what_it_is_not_about_by_name(metric: str, outputs: Tensor, targets: Tensor) -> None:
    with pytest.raises(ConfigError, match=f"metric '{metric}'"):
        build("metric", metric).check(outputs[:2], targets)


def test_metric__of_ones_own_is_a_function_of_samples() -> None:
    with forgotten_parts():

        @fedblur.metric("near", best=1.0, worst=0.0)
        def near(outputs: Tensor, targets: Tensor) -> Tensor:
            return (outputs[:, 0] - targets).abs() < 0.3

        expected = float(((GUESSES[:, 0] - NUMBERS).abs() < 0.3).double().mean())
        assert figure("near", GUESSES, NUMBERS) == pytest.approx(expected)
        assert fedblur.Config(metrics=["near"]).metrics[0].key == "near"

        @fedblur.metric("whole", larger_is_better=False)
        def whole(outputs: Tensor, targets: Tensor) -> Tensor:
            return (outputs[:, 0] - targets).abs().mean()

        with pytest.raises(ConfigError, match=r"metric 'whole' returns \[\], must be one number per sample"):
            figure("whole", GUESSES, NUMBERS)
    for wrong in ({"name": "a b"}, {"name": "x", "best": 0.0, "worst": 1.0}, {"name": "x", "best": math.inf}):
        with pytest.raises(ConfigError, match="metric"):
            fedblur.metric(**wrong)
