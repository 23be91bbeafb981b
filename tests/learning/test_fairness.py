"""Accuracy by class and by client: right, small, and local only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fedblur
from fedblur.data.population import Federation, Packed, Samples
from fedblur.experiments.result_store import make_result
from fedblur.learning.evaluation import (
    MOST_CLIENTS,
    MOST_SAMPLES,
    accuracy_by_group,
    evaluate,
    fairness,
    figure_by_client,
    own_samples,
)
from fedblur.learning.metrics import Accuracy
from fedblur.learning.module_function import Layout, as_function, initial_vector
from fedblur.learning.tasks import Classification
from tests.worlds import SmallCnn, packed

X = torch.rand(300, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 7, (300,), generator=torch.Generator().manual_seed(1))
NAMES = {"class_accuracy", "class_samples", "client_accuracy", "client_samples"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedblur.Run:
    path = tmp_path_factory.mktemp("fairness") / "run"
    return fedblur.train(fedblur.Config(rounds=3, clients=50, seed=0, sample_rate=0.3), out=path)


def test_by_class__classes_weighted_by_their_samples_give_the_accuracy() -> None:
    torch.manual_seed(0)
    module = SmallCnn()
    forward, theta = as_function(module), Layout.of(module).unflatten(initial_vector(module))
    shares, counts = accuracy_by_group(forward, theta, Samples(X, Y), Y, 10)
    assert counts.tolist() == torch.bincount(Y, minlength=10).tolist()
    assert torch.isnan(shares[7:]).all()
    total = float((shares * counts).nansum()) / 300
    assert total == pytest.approx(evaluate(forward, theta, Samples(X, Y))[0])


def test_by_client__takes_some_samples_of_some_clients_and_each_from_its_own() -> None:
    sizes = [1 + 3 * index % 90 for index in range(300)]
    world = packed(sizes)
    marked = Packed(world.x, torch.zeros_like(world.y), world.starts, world.sizes, 10)
    owners = torch.repeat_interleave(torch.arange(300), torch.tensor(sizes))
    marked = Packed(owners.float()[:, None], marked.y, marked.starts, marked.sizes, 10)
    samples, taken = own_samples(marked)
    assert len(taken) == MOST_CLIENTS
    assert int(taken.max()) == MOST_SAMPLES
    whose = torch.linspace(0, 299, MOST_CLIENTS).long()
    assert torch.equal(samples.x[:, 0].long(), torch.repeat_interleave(whose, taken))


def test_by_client__accuracy_is_that_of_each_client_alone() -> None:
    torch.manual_seed(0)
    module, world = SmallCnn(), packed([1, 5, 17, 60, 3])
    forward, theta = as_function(module), Layout.of(module).unflatten(initial_vector(module))
    samples, sizes = own_samples(world)
    alone = figure_by_client(forward, theta, samples, sizes, Classification(), Accuracy())
    found = fairness(forward, theta, Federation("five", world, None, 0, Samples(X, Y)), Samples(X, Y))
    assert found["client_accuracy"] == pytest.approx(alone.tolist(), abs=1e-4)
    assert len(set(found["client_accuracy"])) > 2
    assert found["client_samples"] == [1, 5, 17, MOST_SAMPLES, 3]


def test_fairness__is_in_the_last_round_only_and_under_local_only(run: fedblur.Run) -> None:
    assert set(run.rounds[-1]["local_only"]) >= NAMES
    assert not NAMES & set(run.rounds[-1])
    assert all(not NAMES & set(row["local_only"]) for row in run.rounds[:-1])
    last = run.rounds[-1]["local_only"]
    weighted = sum(a * n for a, n in zip(last["class_accuracy"], last["class_samples"], strict=True))
    assert weighted / sum(last["class_samples"]) == pytest.approx(run.accuracy, abs=1e-3)


def test_fairness__reaches_neither_summary_nor_statement_nor_results(run: fedblur.Run) -> None:
    from fedblur.report.statement import write_statement

    write_statement(run.path)
    config = fedblur.Config(rounds=3, clients=50, seed=0, sample_rate=0.3)
    result = make_result({"cell": "x"}, config, run.summary, run.rounds)
    texts = [json.dumps(result), json.dumps(run.summary)]
    texts += [(run.path / f"statement.{kind}").read_text() for kind in ("md", "html", "json")]
    assert not [name for name in NAMES for text in texts if name in text]


def test_fairness__a_stopped_run_has_none(tmp_path: Path) -> None:
    def stop(row: dict[str, object]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedblur.train(fedblur.Config(rounds=3, clients=50), out=tmp_path / "run", watch=stop)
    assert "class_accuracy" not in (tmp_path / "run/rounds.jsonl").read_text()
