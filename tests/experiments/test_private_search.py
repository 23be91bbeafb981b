"""Guarantees of private tuning: what a search costs, whom it protects, and that only the winner leaves it."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from fedblur import Config, Machine, federation_from_arrays
from fedblur.cli.app import app
from fedblur.core.config import LocalTraining
from fedblur.core.errors import ConfigError, RunError
from fedblur.core.registry import build, parts
from fedblur.data.population import Samples
from fedblur.experiments import private_search
from fedblur.experiments import search_runner as trials
from fedblur.experiments.private_search import candidates, make_search
from fedblur.experiments.search_runner import NOTHING, run_search, tune_on_proxy
from fedblur.learning.evaluation import evaluate, figure_by_client
from fedblur.learning.methods import Method
from fedblur.learning.metrics import Accuracy, Metric
from fedblur.learning.models import make_model
from fedblur.learning.module_function import Layout, Params, as_function, initial_vector
from fedblur.learning.tasks import Classification
from fedblur.privacy import accounting
from fedblur.privacy.events import Gaussian, PrivateSelection, SelfComposed
from fedblur.privacy.ledger import Ledger, read_randomness
from fedblur.privacy.private_selection import TrialCount
from fedblur.report.statement import write_statement
from fedblur.training.loop import Run, train
from fedblur.training.setup import load, plan_for
from fedblur.training.verify_ledger import read_books, verify
from tests.worlds import record_of_a_run

CPU = Machine(device="cpu")
BASE = Config(
    dataset="digits", clients=200, validation_share=0.2, epsilon=4.0, rounds=3, sample_rate=0.2, seed=5,
    local=LocalTraining(steps=2, batch_size=8),
)  # fmt: skip
OTHER = replace(BASE, clip_norm=0.5, rounds=4)
DATA = load(BASE, CPU)
LAW = TrialCount(0.0, 3.0)
RECORD = record_of_a_run()


def test_search__costs_training_clients_their_training_and_validation_clients_their_scores() -> None:
    search = make_search([BASE, OTHER], DATA, LAW, "private")
    *training, score = search.event.trials
    assert [trial.count for trial in training if isinstance(trial, SelfComposed)] == [3, 4]
    assert score == Gaussian(search.score_noise)
    assert search.score_noise > 0
    assert search.epsilon > search.trial_epsilon > 0
    assert search.epsilon == accounting.epsilon(PrivateSelection(search.event.trials, 0.0, 3.0), 1, 1 / 200, "rdp")
    public = make_search([BASE, OTHER], DATA, LAW, "public")
    assert public.score_noise == 0
    assert public.event.trials == tuple(training)


@pytest.mark.parametrize(("personal", "sent"), [((), 6), (("*bias",), 5)])
def test_search__accounts_for_as_many_coordinates_as_a_trial_sends(personal: tuple[str, ...], sent: int) -> None:
    """A discrete mechanism's event depends on d: a regression has one output, whatever number of classes there is."""
    x, owners = torch.randn(400, 5), torch.arange(300) // 5
    data = federation_from_arrays(x[:300], x[:300].sum(1), owners, x[300:], x[300:].sum(1), validation_share=0.3)
    config = Config(
        task="regression", mechanism="skellam", accountant="rdp", epsilon=8.0, rounds=2, sample_rate=0.5,
        personal=personal,
    )  # fmt: skip
    search = make_search([config, replace(config, rounds=3)], data, LAW, "public")
    plans = [plan_for(each, data.train.clients, sent) for each in search.candidates]
    assert search.event.trials == tuple(SelfComposed(plan.event(), plan.rounds) for plan in plans)
    assert plans[0].event() != plan_for(config, data.train.clients, sent - 1).event()


@pytest.mark.parametrize("law", [LAW, TrialCount(1.0, 5.0), TrialCount(math.inf, 3.0)], ids=str)
def test_search__stays_within_a_total_that_is_given(law: TrialCount) -> None:
    search = make_search([BASE, OTHER], DATA, law, "private", total=4.0)
    assert 0.98 * 4.0 < search.epsilon <= 4.0
    assert all(config.epsilon is not None and config.epsilon < 4.0 for config in search.candidates)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(BASE, clip_norm=0.3, clients=150), "clients differs"),
        (replace(BASE, clip_norm=0.3, seed=6), "seed differs"),
        (replace(BASE, clip_norm=0.3, delta=1e-3), "delta differs"),
        (replace(BASE, evaluate="validation"), "at least two"),
    ],
)
def test_candidates__are_about_the_same_people(other: Config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        candidates([BASE, other])


def test_search__refuses_what_it_cannot_account_for() -> None:
    with pytest.raises(ConfigError, match="epsilon=inf"):
        make_search([BASE, replace(BASE, epsilon=math.inf)], DATA, LAW, "private")
    with pytest.raises(ConfigError, match="leaves no clients to score"):
        candidates([replace(c, validation_share=0.0) for c in (BASE, OTHER)])
    with pytest.raises(ConfigError, match="ae-dpfl"):
        candidates([BASE, replace(BASE, method=["ae-dpfl"])])


def test_figure_by_client__averages_to_the_pooled_accuracy_when_weighted_by_size() -> None:
    module = make_model(BASE.model, DATA.train.shape, DATA.train.classes, seed=1)
    theta, forward = Layout.of(module).unflatten(initial_vector(module)), as_function(module)
    assert DATA.validation is not None
    sizes = DATA.validation_sizes
    assert sizes is not None
    assert len(sizes) == DATA.validation_clients
    each = figure_by_client(forward, theta, DATA.validation, sizes, Classification(), Accuracy())
    assert float((each * sizes).sum() / sizes.sum()) == pytest.approx(evaluate(forward, theta, DATA.validation)[0])
    assert 0 <= float(each.min()) < float(each.max()) <= 1


@pytest.mark.parametrize("views", [1, 3])
def test_figure_by_client__of_a_client_is_the_same_whoever_else_there_is(views: int) -> None:
    """Or one client could move everyone's part of the score: by rounding in a shared batch, or by where views fall."""
    module = make_model(BASE.model, DATA.train.shape, DATA.train.classes, seed=1)
    theta, forward = Layout.of(module).unflatten(initial_vector(module)), as_function(module)
    samples, sizes = DATA.validation, DATA.validation_sizes
    assert samples is not None
    assert sizes is not None
    shapes: list[torch.Size] = []

    def watched(params: Params, x: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape)
        return forward(params, x)

    methods = (Flips(),) if views > 1 else ()
    asked = (Classification(), Accuracy(), methods, views)
    together = figure_by_client(watched, theta, samples, sizes, *asked)
    assert len(set(shapes)) == 1
    for k in (0, len(sizes) // 2, len(sizes) - 1):
        start = int(sizes[:k].sum())
        own = Samples(samples.x[start : start + int(sizes[k])], samples.y[start : start + int(sizes[k])])
        assert float(figure_by_client(forward, theta, own, sizes[k : k + 1], *asked)[0]) == float(together[k])


class Flips(Method):
    """A view that differs from batch to batch."""

    def view(self, inputs: torch.Tensor, seed: torch.Tensor, step: torch.Tensor | int) -> torch.Tensor:
        return inputs.roll(int(seed) + int(step), -1)


def test_score__noise_is_never_rounded_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    search, asked = make_search([BASE, OTHER], DATA, LAW, "private"), []
    module = make_model(BASE.model, DATA.train.shape, DATA.train.classes, seed=1).eval()
    bench = trials._Trials(search, tmp_path, CPU, DATA, trials.make_rng(0), lambda config, index: None)
    monkeypatch.setattr(trials.rounded_gaussian, "draw", lambda scale, *_: asked.append(scale) or [0])
    bench.score(Run(tmp_path, RECORD, module, []), BASE, bench.rng)
    exact = 0.5 * search.score_noise * 2**20
    assert exact < asked[0] < exact * (1 + 1e-14)


def test_score__of_a_client_without_samples_is_the_worst(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """0/0 is NaN, and NaN as a whole number would be -2^63: more than any noise hides."""
    search = make_search([BASE, OTHER], DATA, LAW, "public")
    module = make_model(BASE.model, DATA.train.shape, DATA.train.classes, seed=1).eval()
    bench = trials._Trials(search, tmp_path, CPU, DATA, trials.make_rng(0), lambda config, index: None)
    each = torch.full((DATA.validation_clients,), 0.75, dtype=torch.float64)
    each[0] = math.nan
    monkeypatch.setattr(trials, "figure_by_client", lambda *_: each)
    score = bench.score(Run(tmp_path, RECORD, module, []), BASE, bench.rng)
    assert score == pytest.approx(0.5 + (0.25 * (len(each) - 1) - 0.5) / len(each))


def test_figure_by_client__counts_a_client_of_no_samples_as_nan() -> None:
    samples, theta = Samples(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)), {"w": torch.zeros(1)}
    sizes = torch.tensor([2, 0, 1])
    each = figure_by_client(lambda _, x: x.new_zeros(len(x), 2), theta, samples, sizes, Classification(), Accuracy())
    assert each[[0, 2]].tolist() == [1, 1]
    assert math.isnan(each[1])


def test_score__moves_by_no_more_than_half_over_the_clients_when_one_is_removed() -> None:
    """The sum of accuracies less a half: what the score's noise is sized for."""
    each = torch.tensor([0.0, 1.0, 0.3, 1.0], dtype=torch.float64)
    total = (each - 0.5).sum()
    moves = [abs(float(total - (np.delete(each.numpy(), i) - 0.5).sum())) for i in range(4)]
    assert max(moves) == pytest.approx(0.5)


def test_score__one_client_moves_it_by_at_most_what_its_noise_is_sized_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code's own sum, with a client and without, whatever the model gets right."""
    search = make_search([BASE, OTHER], DATA, LAW, "public")  # no noise on scores
    run = Run(tmp_path, RECORD, make_model(BASE.model, DATA.train.shape, DATA.train.classes, seed=1).eval(), [])
    bench = trials._Trials(search, tmp_path, CPU, DATA, trials.make_rng(0), lambda config, index: None)

    def score(each: list[float]) -> float:
        monkeypatch.setattr(trials, "figure_by_client", lambda *given: torch.tensor(each, dtype=torch.float64))
        return bench.score(run, BASE, bench.rng) * DATA.validation_clients

    everyone = [0.0, 1.0, 0.25, 1.0, 0.0, 0.7]
    moves = [abs(score(everyone) - score(everyone[:i] + everyone[i + 1 :])) for i in range(6)]
    assert max(moves) == pytest.approx(0.5, abs=1e-8)


@pytest.fixture(scope="module")
def won(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("search") / "winner"
    run_search(make_search([BASE, OTHER], DATA, LAW, "private"), out, CPU, DATA)
    return out


def test_search__releases_the_winner_and_nothing_else(won: Path) -> None:
    names = {"config.json", "ledger.jsonl", "model.safetensors", "rounds.jsonl", "summary.json"}
    assert {path.name for path in won.rglob("*")} == names
    assert [path.name for path in won.parent.iterdir()] == [won.name]
    rows = [json.loads(line) for line in (won / "rounds.jsonl").read_text().splitlines()]
    assert all("local_only" not in row and "epsilon" not in row for row in rows)


def test_search__releases_no_times(won: Path) -> None:
    """How long the winner trained depends on how many clients came, which is private."""

    def keys(value: object) -> set[str]:
        nested = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        own = {key for key, item in value.items() if item is not None} if isinstance(value, dict) else set()
        return own.union(*map(keys, nested))

    summary = json.loads((won / "summary.json").read_text())
    rows = [json.loads(line) for line in (won / "rounds.jsonl").read_text().splitlines()]
    assert len(rows) >= 3
    assert summary["machine"]
    for name in keys([summary, rows]):
        assert not re.search("second|time|elapsed|duration", name), name


def test_search__states_its_cost_and_whom_it_protects_but_not_the_number_of_trials(won: Path) -> None:
    privacy = json.loads((won / "summary.json").read_text())["privacy"]
    search = make_search([BASE, OTHER], DATA, LAW, "private")
    assert privacy["epsilon"] == pytest.approx(search.epsilon)
    assert privacy["accountant"] == "rdp"
    assert privacy["warning"] == "NOT PRIVATE: seeded"
    assert privacy["tuned"] == "private selection"
    chosen = privacy["selection"]
    assert chosen["epsilon_of_one_trial"] + chosen["epsilon_of_the_choice"] == pytest.approx(privacy["epsilon"])
    assert chosen["score_clients_protected"] is True
    assert chosen["expected_trials"] == 3.0
    assert set(chosen).isdisjoint({"trials", "count", "picks"})


def test_search__is_in_the_ledger_once_and_its_budget_is_spent(won: Path) -> None:
    search = make_search([BASE, OTHER], DATA, LAW, "private")
    ledger = Ledger(won / "ledger.jsonl", accounting_budget(search.epsilon), search.key)
    assert ledger.spends() == [(1, search.event)]
    assert read_books(won).randomness == "seed"
    assert read_randomness(ledger._chain) == "seed"
    assert ledger.epsilon() == pytest.approx(search.epsilon)


def test_statement__says_how_settings_were_chosen_and_what_it_cost(won: Path, tmp_path: Path) -> None:
    _, path = write_statement(shutil.copytree(won, tmp_path / "copy"))
    page = path.with_suffix(".md").read_text()
    assert "chosen privately among 2 configurations" in page
    assert "the choice costs" in page
    assert "not recorded" not in page
    assert "1 release of the winner of a private search" in page
    assert "a release that would exceed" in page
    assert "NOT for" not in page  # scores were noisy


def test_statement__of_scores_without_noise_names_whom_it_does_not_protect(won: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(won, tmp_path / "copy")
    summary = json.loads((copy / "summary.json").read_text())
    summary["privacy"]["selection"] |= {"score_clients_protected": False}
    (copy / "summary.json").write_text(json.dumps(summary))
    statement, path = write_statement(copy)
    assert f"NOT for the {summary['privacy']['selection']['score_clients']} validation clients" in statement.one_line()
    assert "settings were chosen by their scores, without noise" in path.with_suffix(".md").read_text()


def test_search__can_be_verified_and_an_edited_one_is_found(won: Path, tmp_path: Path) -> None:
    assert verify(won) == []
    copy = shutil.copytree(won, tmp_path / "copy")
    text = (copy / "ledger.jsonl").read_text()
    (copy / "ledger.jsonl").write_text(text.replace('"mean": 3.0', '"mean": 2.0').replace('"mean":3.0', '"mean":2.0'))
    assert (copy / "ledger.jsonl").read_text() != text
    assert verify(copy)
    other = shutil.copytree(won, tmp_path / "other")
    summary = json.loads((other / "summary.json").read_text())
    summary["privacy"]["selection"]["search"] = "0" * 12
    (other / "summary.json").write_text(json.dumps(summary))
    assert any("opened for search" in line for line in verify(other))


def accounting_budget(epsilon: float) -> "trials.Budget":
    return trials.Budget(epsilon, 1 / 200, "rdp", 1)


def test_search__is_paid_for_before_its_first_trial_and_goes_on_with_what_was_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    law = TrialCount(1.0, 4.0)
    seed = next(
        seed for seed in range(99) if law.draw(trials.make_rng(seed).child("count").keystream().lane(0).words(13)) == 3
    )
    search = make_search([replace(c, seed=seed) for c in (BASE, OTHER)], DATA, law, "private")
    whole = run_search(search, tmp_path / "whole", CPU, DATA)
    started: list[str] = []

    def dying(config: Config, **settings: object) -> object:
        started.append(str(settings["out"]))
        if len(started) == 2:
            raise KeyboardInterrupt
        return train(config, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(trials, "train", dying)
    with pytest.raises(KeyboardInterrupt):
        run_search(search, tmp_path / "cut", CPU, DATA)
    ledger = Ledger(tmp_path / "cut" / "ledger.jsonl", accounting_budget(search.epsilon))
    assert ledger.spends() == [(1, search.event)]
    assert not (tmp_path / "cut" / "summary.json").exists()
    assert json.loads((tmp_path / "cut-local-only" / "drawn.json").read_text())["local_only"] is True
    resumed = run_search(search, tmp_path / "cut", CPU, DATA)
    assert len(ledger.spends()) == 1
    assert resumed.summary["privacy"]["selection"]["score"] == whole.summary["privacy"]["selection"]["score"]
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    with pytest.raises(RunError, match="holds the winner"):
        run_search(search, tmp_path / "cut", CPU, DATA)


def test_search__of_another_kind_does_not_take_over_drawn_trials(tmp_path: Path) -> None:
    search = make_search([BASE, OTHER], DATA, LAW, "private")
    trials._draw(search, tmp_path / "x-local-only", trials.make_rng(5))
    with pytest.raises(RunError, match="another search"):
        run_search(make_search([BASE, OTHER], DATA, LAW, "public"), tmp_path / "x", CPU, DATA)


def test_search__never_draws_again(tmp_path: Path) -> None:
    search = make_search([BASE, OTHER], DATA, TrialCount(1.0, 50.0), "private")
    rng = trials.make_rng(None)
    first = trials._draw(search, tmp_path / "x-local-only", rng)
    assert all(trials._draw(search, tmp_path / "x-local-only", rng) == first for _ in range(5))
    local = tmp_path / "x-local-only"  # the number of trials is secret
    assert all(path.stat().st_mode & 0o077 == 0 for path in (local, *local.iterdir()))


@pytest.mark.parametrize("scoring", ["private", "public"])
def test_score__has_the_noise_that_is_accounted(scoring: Literal["private", "public"], tmp_path: Path) -> None:
    search = make_search([BASE, OTHER], DATA, LAW, scoring)
    module = make_model(BASE.model, DATA.train.shape, DATA.train.classes, seed=1).eval()
    run = Run(tmp_path, RECORD, module, [])
    bench = trials._Trials(search, tmp_path, CPU, DATA, trials.make_rng(0), lambda config, index: None)
    scores = [bench.score(run, BASE, trials.make_rng(seed)) for seed in range(200)]
    wanted = 0.5 * search.score_noise / DATA.validation_clients
    assert np.std(scores) == pytest.approx(wanted, rel=0.2)
    exact = make_search([BASE, OTHER], DATA, LAW, "public")
    truth = trials._Trials(exact, tmp_path, CPU, DATA, bench.rng, bench.watch).score(run, BASE, bench.rng)
    assert np.mean(scores) == pytest.approx(truth, abs=4 * wanted / math.sqrt(200) + 1e-12)


@pytest.mark.parametrize("figure", [0.0, 0.3, 1.0, 7.5, 1e300, -1.0, math.inf, -math.inf, math.nan])
def test_score__of_every_metric_and_figure_is_in_the_unit_interval(figure: float) -> None:
    """The noise is sized for a client that moves the sum by at most a half."""
    search = replace(make_search([BASE, OTHER], DATA, LAW, "private"), score_scale=50.0)
    for name in parts("metric"):
        assert 0.0 <= search.score(build("metric", name), figure) <= 1.0


def test_score__of_an_error_is_a_half_at_the_scale() -> None:
    search = replace(make_search([BASE, OTHER], DATA, LAW, "private"), score_scale=50.0)
    assert search.score(build("metric", "rmse"), 50.0) == pytest.approx(0.5)
    assert search.score(build("metric", "perplexity"), 51.0) == pytest.approx(0.5)
    assert search.score(build("metric", "accuracy"), 0.7) == 0.7
    assert search.key != make_search([BASE, OTHER], DATA, LAW, "private").key  # another search: trials are not mixed


def test_score__a_metric_without_a_bounded_form_is_refused_by_name() -> None:
    class Endless(Metric):
        part_name = "endless"
        best = math.inf

    metric = Endless()
    with pytest.raises(ConfigError, match="metric 'endless' has no best value"):
        private_search._demand_scores([replace(BASE, metrics=()), _about(metric)], 1.0)
    with pytest.raises(ConfigError, match="score_scale=2 does not apply to accuracy"):
        make_search([BASE, OTHER], DATA, LAW, "private", scale=2.0)


def _about(metric: Metric) -> Config:
    """A configuration about a metric that nobody has registered."""
    config = replace(BASE)
    object.__setattr__(config, "metrics", (metric,))
    return config


class Broken(torch.nn.Module):
    """Gives the same number for every class of every sample."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.full((DATA.train.classes,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value.expand(len(x), -1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_score__of_a_model_that_gives_nan_is_the_worst_and_finite(value: float, tmp_path: Path) -> None:
    """Argmax takes NaN for the first class: every client with that label would have scored."""
    search = make_search([BASE, OTHER], DATA, LAW, "public")
    bench = trials._Trials(search, tmp_path, CPU, DATA, trials.make_rng(0), lambda config, index: None)
    assert bench.score(Run(tmp_path, RECORD, Broken(value), []), BASE, bench.rng) == 0.0
    assert bench.score(None, BASE, bench.rng) == 0.0
    assert bench.score(Run(tmp_path, RECORD, Broken(0.0), []), BASE, bench.rng) > 0.0
    assert DATA.validation is not None
    module = Broken(value)
    theta = Layout.of(module).unflatten(initial_vector(module))
    assert evaluate(as_function(module), theta, DATA.validation)[0] == 0.0


@pytest.mark.parametrize("made_up", [math.nan, math.inf, -math.inf, 7.0])
def test_score__stays_within_what_its_noise_is_sized_for(
    made_up: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = make_search([BASE, OTHER], DATA, LAW, "public")
    bench = trials._Trials(search, tmp_path, CPU, DATA, trials.make_rng(0), lambda config, index: None)
    clients = torch.full((DATA.validation_clients,), made_up, dtype=torch.float64)
    monkeypatch.setattr(trials, "figure_by_client", lambda *arguments: clients)
    worst = not made_up > 0
    assert bench.score(Run(tmp_path, RECORD, Broken(0.0), []), BASE, bench.rng) == (0.0 if worst else 1.0)


DIVERGING = replace(BASE, model="mlp", local=LocalTraining(steps=2, batch_size=8, learning_rate=1e38))


def test_search__a_trial_that_diverges_is_neither_skipped_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seeded run stops when all its updates are NaN; its search goes on with the next trial."""
    monkeypatch.setattr(trials, "_draw", lambda search, local, rng: local.mkdir(parents=True) or [1, 0, 1])
    scores: list[float] = []
    score = trials._Trials.score

    def scored(self: trials._Trials, run: Run | None, *others: object) -> float:
        scores.append(score(self, run, *others))  # type: ignore[arg-type]
        return scores[-1]

    monkeypatch.setattr(trials._Trials, "score", scored)
    search = make_search([BASE, DIVERGING], DATA, LAW, "public")
    tuned = run_search(search, tmp_path / "x", CPU, DATA)
    assert scores[0] == scores[2] == 0.0 < scores[1]
    assert tuned.summary["privacy"]["selection"]["score"] == scores[1]
    assert json.loads((tmp_path / "x" / "config.json").read_text())["local"]["learning_rate"] == 0.1


def test_search__where_every_trial_diverges_releases_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_draw", lambda search, local, rng: local.mkdir(parents=True) or [1, 1])
    tuned = run_search(make_search([BASE, DIVERGING], DATA, LAW, "public"), tmp_path / "x", CPU, DATA)
    assert tuned.summary["privacy"]["selection"]["score"] == 0.0
    assert (tmp_path / "x" / "model.safetensors").exists()


def test_proxy__a_configuration_that_diverges_there_is_not_chosen(tmp_path: Path) -> None:
    tuned = tune_on_proxy([DIVERGING, OTHER], {"dataset": "synthetic", "clients": 30}, tmp_path / "x", CPU)
    assert json.loads((tmp_path / "x" / "config.json").read_text())["clip_norm"] == OTHER.clip_norm
    assert tuned.summary["status"] == "complete"
    accuracies = [trial["accuracy"] for trial in json.loads((tmp_path / "x" / "proxy.json").read_text())]
    assert accuracies[0] == 0.0 < accuracies[1]


def test_search__without_validation_clients_says_to_raise_the_share() -> None:
    with pytest.raises(ConfigError, match=r"validation_share=0\.2 gives no clients to score trials on here; raise it"):
        make_search([BASE, OTHER], replace(DATA, validation=None, validation_clients=0), LAW, "private")


def test_search__without_a_trial_releases_that_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_draw", lambda search, local, rng: local.mkdir(parents=True) or [])
    tuned = run_search(make_search([BASE, OTHER], DATA, TrialCount(math.inf, 1.5), "public"), tmp_path / "x", CPU, DATA)
    assert tuned.summary["status"] == NOTHING
    assert tuned.summary["privacy"]["epsilon"] > 0
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"ledger.jsonl", "summary.json"}


def test_search__picks_every_configuration_and_number_as_the_law_says(tmp_path: Path) -> None:
    search = make_search([BASE, OTHER], DATA, TrialCount(1.0, 4.0), "public")
    drawn = [trials._draw(search, tmp_path / str(seed), trials.make_rng(seed)) for seed in range(300)]
    assert np.mean([len(picks) for picks in drawn]) == pytest.approx(4.0, abs=4 * math.sqrt(12 / 300))
    assert np.mean([pick for picks in drawn for pick in picks]) == pytest.approx(0.5, abs=0.06)


def test_search__the_number_of_trials_is_as_random_as_the_law(tmp_path: Path) -> None:
    """The mean alone would not do: K that is always its mean is not secret, and the accounting is for a random one."""
    law = TrialCount(1.0, 4.0)
    search = make_search([BASE, OTHER], DATA, law, "public")
    drawn = [len(trials._draw(search, tmp_path / str(seed), trials.make_rng(seed))) for seed in range(300)]
    chances = law.chances(9)[1:]
    counts = np.bincount(np.clip(drawn, 1, 10) - 1, minlength=10)
    assert stats.chisquare(counts, 300 * np.append(chances, 1 - chances.sum())).pvalue > 1e-3


def test_proxy__chooses_elsewhere_and_costs_one_ordinary_run(tmp_path: Path) -> None:
    weak = replace(BASE, rounds=1, local=LocalTraining(steps=1, batch_size=1, learning_rate=1e-6))
    proxy = {"dataset": "synthetic", "clients": 30}
    tuned = tune_on_proxy([weak, replace(OTHER, clip_norm=3.0)], proxy, tmp_path / "x", CPU)
    assert json.loads((tmp_path / "x" / "config.json").read_text())["clip_norm"] == 3.0
    privacy = tuned.summary["privacy"]
    assert privacy["epsilon"] <= 4.0
    assert privacy["accountant"] == "pld"
    assert "cost no privacy" in privacy["tuning"]
    assert len(json.loads((tmp_path / "x" / "proxy.json").read_text())) == 2
    assert len(list((tmp_path / "x-proxy").iterdir())) == 2
    with pytest.raises(ConfigError, match="private data set itself"):
        tune_on_proxy([weak, OTHER], {"dataset": "digits"}, tmp_path / "y", CPU)


def test_proxy__the_same_people_with_other_settings_are_not_public(tmp_path: Path) -> None:
    writers = [Config(dataset="femnist"), Config(dataset="femnist", clip_norm=0.2)]
    proxy = {"dataset": {"name": "femnist", "min_samples": 50}}
    with pytest.raises(ConfigError, match="proxy='femnist' is the private data set itself"):
        tune_on_proxy(writers, proxy, tmp_path / "x", CPU)


GRID = """
[base]
dataset = "digits"
clients = 200
epsilon = 4.0
rounds = 2
seed = 1
local = { steps = 1, batch_size = 4 }
[axes]
clip_norm = [0.1, 0.5]
"""


def test_tune__says_its_cost_first_and_prints_the_winner(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(GRID)
    command = ["tune", str(tmp_path / "grid.toml"), "--trials", "2", "--out", str(tmp_path / "w"), "--device", "cpu"]
    dry = CliRunner().invoke(app, [*command, "--dry-run"])
    assert dry.exit_code == 0
    assert "2 configurations, 2 trials expected" in dry.output
    assert not (tmp_path / "w").exists()
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0
    shown = json.loads(done.output)
    assert shown["privacy"]["tuned"] == "private selection"
    kept = json.loads((tmp_path / "w/config.json").read_text())["clip_norm"]
    assert shown["winner"] == f"run | clip_norm={kept}"


def test_tune__on_proxy_data_prints_every_score_and_the_winner(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(GRID)
    command = ["tune", str(tmp_path / "grid.toml"), "--proxy", "synthetic", "--out", str(tmp_path / "w"), "--quiet"]
    done = CliRunner().invoke(app, [*command, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    kept = json.loads((tmp_path / "w/config.json").read_text())["clip_norm"]
    lines = done.output.splitlines()
    assert lines[0].endswith(f"on proxy data: run | clip_norm={kept}")
    assert lines[2] == f"Winner: run | clip_norm={kept}, one of 2 configurations"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--trials", "1"], "trials=1.0 must be above 1"),
        (["--eta", "-1"], "eta=-1.0 must be above -1"),
        (["--score", "secret"], "score='secret' must be"),
        (["--epsilon", "0"], "epsilon=0.0 must be above 0"),
        (["--proxy", "digits"], "private data set itself"),
    ],
)
def test_tune__names_what_is_wrong_in_one_line(flags: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(GRID)
    result = CliRunner().invoke(app, ["tune", str(tmp_path / "grid.toml"), "--out", str(tmp_path / "w"), *flags])
    assert result.exit_code == 2
    assert words in result.output
    assert result.output.count("\n") == 1
