"""Accuracy of a released model: chunked, without dropout, and over several views where the configuration says so."""

import pytest
import torch
import torch.nn.functional as F

from fedblur.core.config import Config, from_dict
from fedblur.core.errors import ConfigError
from fedblur.data.population import Samples
from fedblur.learning.evaluation import evaluate
from fedblur.learning.methods.augment import Augment
from fedblur.learning.module_function import Layout, as_function, initial_vector
from fedblur.training.loop import train
from tests.worlds import SmallCnn

X = torch.rand(1500, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 10, (1500,), generator=torch.Generator().manual_seed(1))


def model():
    torch.manual_seed(0)
    module = SmallCnn()
    return as_function(module), Layout.of(module).unflatten(initial_vector(module)), module.eval()


def test_evaluate__is_the_plain_accuracy_and_loss_without_dropout() -> None:
    forward, theta, module = model()
    accuracy, loss = evaluate(forward, theta, Samples(X, Y))
    logits = module(X).detach()
    assert accuracy == int((logits.argmax(1) == Y).sum()) / 1500
    assert loss == pytest.approx(float(F.cross_entropy(logits, Y)), rel=1e-5)


def test_evaluate__views_are_averaged_as_probabilities() -> None:
    forward, theta, module = model()
    method = Augment(shift=0.2)
    _, loss = evaluate(forward, theta, Samples(X[:10], Y[:10]), (method,), views=2)
    views = [X[:10], method.view(X[:10], torch.tensor(0), 1)]
    chances = torch.stack([module(view).detach().softmax(1) for view in views]).mean(0)
    assert loss == pytest.approx(float(F.nll_loss(chances.log(), Y[:10])), rel=1e-4)


def test_evaluate__views_that_do_not_differ_change_nothing() -> None:
    forward, theta, _ = model()
    once = evaluate(forward, theta, Samples(X, Y))
    assert evaluate(forward, theta, Samples(X, Y), (Augment(shift=0),), 3) == pytest.approx(once, rel=1e-5)


def test_test_views__are_stated_in_the_result(tmp_path) -> None:
    run = train(from_dict({"rounds": 1, "seed": 0, "method": "augment", "test_views": 3}), out=tmp_path / "run")
    assert run.summary["evaluated_on"] == "3 views of each of the test"
    assert "measured on 3 views of each of the test data" in run.summary["privacy"]["tuning"]


def test_test_views__need_a_method_that_makes_them() -> None:
    with pytest.raises(ConfigError, match="test_views=3 needs method 'augment'"):
        Config(test_views=3)
