"""All that trains on people asks their population: Python, commands, tables, searches, votes, audits, Flower."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedblur
from fedblur.core.errors import ConfigError, PrivacyError, RunError
from fedblur.data.federation import federation_from_arrays
from fedblur.data.population import Federation
from fedblur.experiments.audit import audit
from fedblur.experiments.private_search import make_search
from fedblur.experiments.search_runner import load_data, run_search, tune_on_proxy
from fedblur.privacy import accounting, events, totals
from fedblur.privacy.ledger import Chain, read_spends
from fedblur.privacy.population_account import fingerprint, population_of
from fedblur.privacy.populations import Limit, Population, every
from fedblur.privacy.private_selection import TrialCount
from tests.commandline import invoke
from tests.e2e import spenders

CPU = fedblur.Machine(device="cpu", engine="sequential")
SIGMA, DELTA = 8.0, 0.01
FLAGS = ["--set", f"noise_multiplier={SIGMA}", "--delta", DELTA, "--sample-rate", 1, "--clients", 40, "--quiet"]
SETTINGS: dict[str, Any] = {"noise_multiplier": SIGMA, "delta": DELTA, "sample_rate": 1.0}


def config(rounds: int = 2, **changes: Any) -> fedblur.Config:
    local = fedblur.LocalTraining(steps=1, batch_size=4)
    return fedblur.Config(**{**SETTINGS, "rounds": rounds, "local": local, **changes})


def people(population: str | None = None, clients: int = 20, **more: Any) -> Federation:
    dice = np.random.default_rng(0)
    x, y = dice.normal(size=(4 * clients, 6)).astype(np.float32), dice.integers(0, 3, 4 * clients)
    return federation_from_arrays(
        x, y, np.arange(4 * clients) % clients, x[:9], y[:9], 3, population=population, **more
    )


def budget(releases: int, name: str = "ward-3") -> Population:
    """Set a budget of so many releases on everyone with noise SIGMA, and a little."""
    population = Population(name)
    event = events.Gaussian(SIGMA)
    population.set_limit(Limit(1.0001 * accounting.epsilon(event, releases, DELTA), DELTA))
    return population


def written() -> list[str]:
    return [population.name for population in every()]


# --- each way to train ---


def test_python__is_refused_in_another_folder_and_says_the_total(tmp_path: Path) -> None:
    budget(3)
    run = fedblur.train(config(2), federation=people("ward-3"), out=tmp_path / "a", machine=CPU)
    total = run.record.privacy.population
    assert total is not None
    assert (total.name, total.runs, total.epsilon) == ("ward-3", 1, run.epsilon)
    with pytest.raises(PrivacyError, match=r"population ward-3 has a budget .* 1 other run spent"):
        fedblur.train(config(2), federation=people("ward-3"), out=tmp_path / "b", machine=CPU)
    assert not (tmp_path / "b").exists()
    fedblur.train(config(1), federation=people("ward-3"), out=tmp_path / "c", machine=CPU)
    fedblur.train(config(2), federation=people("ward-4"), out=tmp_path / "d", machine=CPU)
    assert json.loads((tmp_path / "a/statement.json").read_text())["claim"]["population"]["name"] == "ward-3"
    assert "people, when this one ended | population ward-3: ε = " in (tmp_path / "a/statement.md").read_text()


def test_command__is_refused_in_another_folder_and_says_the_total(tmp_path: Path) -> None:
    budget(3)
    said = invoke("run", "--population", "ward-3", "--rounds", 2, "--out", tmp_path / "a", *FLAGS)
    assert "population ward-3: ε = " in said
    assert "at δ = 0.01, 1 run" in said
    refused = invoke("run", "--population", "ward-3", "--rounds", 2, "--out", tmp_path / "b", *FLAGS, status=2)
    assert "error: population ward-3 has a budget of ε = " in refused
    assert not (tmp_path / "b").exists()
    (tmp_path / "one.toml").write_text('population = "ward-3"\n')
    assert "has a budget" in invoke(
        "run", tmp_path / "one.toml", "--rounds", 2, "--out", tmp_path / "b", *FLAGS, status=2
    )
    assert "has a budget" not in invoke("run", "--rounds", 2, "--out", tmp_path / "b", *FLAGS)


def test_resume__goes_on_with_what_the_run_had_reserved(tmp_path: Path) -> None:
    budget(3)

    def stop(row: fedblur.Row) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedblur.train(config(3), federation=people("ward-3"), out=tmp_path / "a", machine=CPU, watch=stop)
    with pytest.raises(PrivacyError, match="has a budget"):
        fedblur.train(config(1), federation=people("ward-3"), out=tmp_path / "b", machine=CPU)
    for other in ("ward-4", None):
        with pytest.raises(RunError, match="charged to population 'ward-3', and these data are of"):
            fedblur.resume(tmp_path / "a", federation=people(other), machine=CPU, tell=lambda note: None)
    run = fedblur.resume(tmp_path / "a", federation=people("ward-3"), machine=CPU, tell=lambda note: None)
    assert run.record.complete
    (entry,) = Population("ward-3").entries()
    assert (entry.spent, entry.state) == (3, "complete")


def test_copied_run__cannot_be_resumed_twice(tmp_path: Path) -> None:
    def stop(row: fedblur.Row) -> None:
        raise KeyboardInterrupt

    quiet: dict[str, Any] = {"machine": CPU, "tell": lambda note: None}
    with pytest.raises(KeyboardInterrupt):
        fedblur.train(config(4), federation=people("ward-3"), out=tmp_path / "a", machine=CPU, watch=stop)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    fedblur.resume(tmp_path / "a", federation=people("ward-3"), **quiet)
    with pytest.raises(PrivacyError, match="population ward-3 remembers 4 releases, it has 1"):
        fedblur.resume(tmp_path / "b", federation=people("ward-3"), **quiet)


def test_table__is_refused_when_its_cells_have_used_the_budget(tmp_path: Path) -> None:
    population = budget(5)
    (tmp_path / "t.toml").write_text(
        f"[base]\nclients = 40\nrounds = 2\nnoise_multiplier = {SIGMA}\ndelta = {DELTA}\nsample_rate = 1.0\n"
        'population = "ward-3"\n[axes]\nclip_norm = [0.1, 0.2, 0.3]\n'
    )
    refused = invoke("table", tmp_path / "t.toml", "--out", tmp_path / "out", "--quiet", status=2)
    assert "population ward-3 has a budget" in refused
    assert [(entry.kind, entry.spent) for entry in population.entries()] == [("table cell", 2)] * 2
    shown = invoke("table", tmp_path / "t.toml", "--only", "0.1", "--out", tmp_path / "out", "--quiet")
    assert "population ward-3: ε = " in shown
    assert "2 runs" in shown
    invoke("table", tmp_path / "t.toml", "--population", "other", "--out", tmp_path / "out", "--quiet")
    assert [entry.spent for entry in Population("other").entries()] == [2]  # what was computed is not paid for again


def test_tune__pays_once_for_a_search_and_is_refused_beyond_the_budget(tmp_path: Path) -> None:
    base = config(2, dataset="digits", clients=60, validation_share=0.2, population="ward-3", accountant="rdp")
    data = load_data([base, replace(base, clip_norm=0.2)], CPU)
    search = make_search([base, replace(base, clip_norm=0.2)], data, TrialCount(0.0, 2.0), "private")
    population = Population("ward-3")
    population.set_limit(Limit(1.5 * search.epsilon, DELTA))
    tuned = run_search(search, tmp_path / "a", CPU, data)
    (entry,) = population.entries()  # its trials are covered
    assert (entry.kind, entry.spent, entry.release) == ("search", 1, search.event)
    if tuned.record is not None:
        assert tuned.record.privacy.population is not None
    with pytest.raises(PrivacyError, match="this search of at most 1 releases would bring it to"):
        run_search(search, tmp_path / "b", CPU, data)
    assert not (tmp_path / "b" / "ledger.jsonl").exists()
    public = make_search(search.candidates, data, TrialCount(0.0, 2.0), "public")
    with pytest.raises(PrivacyError, match="score='public' does not protect"):
        run_search(public, tmp_path / "c", CPU, data)


def test_tune__on_proxy_data_charges_the_run_on_people_alone(tmp_path: Path) -> None:
    base = config(1, dataset="digits", clients=60, population="ward-3")
    configs = [base, replace(base, clip_norm=0.2)]
    tune_on_proxy(configs, {"dataset": "synthetic", "clients": 20, "validation_share": 0.2}, tmp_path / "a", CPU)
    assert [(entry.kind, entry.spent) for entry in Population("ward-3").entries()] == [("run", 1)]


def test_voting__is_charged_and_refused_beyond_the_budget(tmp_path: Path) -> None:
    votes = fedblur.Config(
        dataset="digits", clients=60, method={"name": "knn-dpfl", "student_steps": 20, "queries": 20}, epsilon=4.0,
        delta=DELTA, population="ward-3",
    )  # fmt: skip
    population = Population("ward-3")
    population.set_limit(Limit(6.0, DELTA))
    run = fedblur.train(votes, out=tmp_path / "a", machine=CPU)
    assert run.record.privacy.population is not None
    assert [(entry.kind, entry.spent, entry.state) for entry in population.entries()] == [("voting", 1, "complete")]
    with pytest.raises(PrivacyError, match="population ward-3 has a budget"):
        fedblur.train(votes, out=tmp_path / "b", machine=CPU)


def test_audit__is_charged_and_reads_nothing_that_no_epsilon_covers(tmp_path: Path) -> None:
    population = budget(3)
    found = audit(config(2), tmp_path / "a", canaries=100, held_out=100, machine=CPU, federation=people("ward-3"))
    assert [(entry.kind, entry.spent) for entry in population.entries()] == [("audit", 2)]
    assert all(check.p_value is None for check in found.checks)
    assert found.facts()["population"]["runs"] == 1
    with pytest.raises(PrivacyError, match="has a budget"):
        audit(config(2), tmp_path / "a", canaries=100, held_out=100, machine=CPU, federation=people("ward-3"))
    with pytest.raises(PrivacyError, match="would bring it to ε = ∞"):
        audit(
            config(1), tmp_path / "b", canaries=100, held_out=100, machine=CPU, federation=people("ward-3"),
            remove_noise=True,
        )  # fmt: skip
    free = audit(config(1), tmp_path / "c", canaries=100, held_out=100, machine=CPU, federation=people("ward-4"))
    assert any(check.p_value is not None for check in free.checks)


def test_flower__is_refused_before_any_node_is_asked(tmp_path: Path) -> None:
    from fedblur.flower.server import serve
    from fedblur.flower.settings import Settings
    from tests.flower.world import LoopGrid, deployment

    population = budget(5)
    task = deployment(tmp_path, 4, seed=None, noise_multiplier=SIGMA, delta=DELTA)

    def deploy(folder: str) -> LoopGrid:
        grid = LoopGrid(task, 4, "central")
        given = {"trust": "central", "deadline": 60, "start-timeout": 60, "out": str(tmp_path / folder)}
        try:
            serve(task, grid, Settings.read(given | {"population": "ward-3"}))
        finally:
            asked.append(len(grid.asked))
        return grid

    asked: list[int] = []
    deploy("a")
    assert [(entry.kind, entry.spent) for entry in population.entries()] == [("deployment", 3)]
    with pytest.raises(PrivacyError, match="this deployment of at most 3 releases would bring it to"):
        deploy("b")
    assert asked[0] > 0 == asked[1]


def test_evaluation__of_people_without_noise_is_refused_where_a_budget_is_set(tmp_path: Path) -> None:
    budget(3)
    data = people("ward-3", validation_share=0.3)
    with pytest.raises(PrivacyError, match="evaluate='validation' measures people of population ward-3"):
        fedblur.train(config(1, evaluate="validation"), federation=data, out=tmp_path / "a", machine=CPU)
    fedblur.train(config(1), federation=data, out=tmp_path / "b", machine=CPU)


def test_seeded_run__is_refused_where_a_budget_is_set_and_counts_as_infinite_elsewhere(tmp_path: Path) -> None:
    budget(3)
    with pytest.raises(PrivacyError, match="is seeded: ε = ∞"):
        fedblur.train(config(1, seed=1), federation=people("ward-3"), out=tmp_path / "a", machine=CPU)
    run = fedblur.train(config(1, seed=1), federation=people("ward-4"), out=tmp_path / "b", machine=CPU)
    assert run.record.privacy.population is not None
    assert run.record.privacy.population.epsilon == math.inf


# --- whose data are tracked ---


def test_public_data__write_nothing_unless_someone_names_them(tmp_path: Path, own_populations: Path) -> None:
    fedblur.train(config(1, clients=40), out=tmp_path / "a", machine=CPU)
    fedblur.train(config(1), federation=people(public=True), out=tmp_path / "b", machine=CPU)
    fedblur.train(config(1, dataset="synthetic", clients=20), out=tmp_path / "c", machine=CPU)
    assert not own_populations.exists()
    run = fedblur.train(config(1, clients=40, population="students"), out=tmp_path / "d", machine=CPU)
    assert run.record.privacy.population is not None
    assert written() == ["students"]


def test_own_data__are_tracked_by_a_keyed_hash_of_their_clients(
    tmp_path: Path, own_populations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"person {number}" for number in range(20)]
    for folder in ("a", "b"):
        run = fedblur.train(config(1), federation=people(names=names), out=tmp_path / folder, machine=CPU)
    total = run.record.privacy.population
    assert total is not None
    assert (total.name, total.runs) == (fingerprint(people(names=names)), 2)
    assert total.name.startswith("unnamed-")
    assert fingerprint(people(names=[*names[:-1], "somebody else"])) != total.name
    assert fingerprint(people(clients=19)) != fingerprint(people(clients=20))
    monkeypatch.setenv("FEDBLUR_POPULATIONS", str(tmp_path / "another key"))
    assert fingerprint(people(names=names)) != total.name
    everything = b"".join(path.read_bytes() for path in own_populations.rglob("*") if path.is_file())
    assert b"person 3" not in everything


def test_own_data__without_a_name_belong_to_the_population_that_has_a_budget_for_their_ids(tmp_path: Path) -> None:
    """Leaving the name out passed any budget."""
    population, names = budget(3), [f"person {number}" for number in range(20)]
    fedblur.train(config(2), federation=people("ward-3", names=names), out=tmp_path / "a", machine=CPU)
    with pytest.raises(PrivacyError, match="population ward-3 has a budget"):
        fedblur.train(config(2), federation=people(names=names[::-1]), out=tmp_path / "b", machine=CPU)
    fedblur.train(config(1), federation=people(names=names), out=tmp_path / "c", machine=CPU)
    assert sorted(entry.spent for entry in population.entries()) == [1, 2]  # begun in the same second, perhaps
    fedblur.train(config(2), federation=people(names=[*names[:-1], "somebody else"]), out=tmp_path / "d", machine=CPU)
    budget(9, "ward-4")
    fedblur.train(config(2), federation=people("ward-4", names=names), out=tmp_path / "e", machine=CPU)
    with pytest.raises(ConfigError, match="are those of populations ward-3 and ward-4; give population="):
        fedblur.train(config(1), federation=people(names=names), out=tmp_path / "f", machine=CPU)


def test_own_data__that_get_a_name_later_bring_what_was_spent_before(tmp_path: Path) -> None:
    """Naming the data, with a budget, forgot every earlier run."""

    def stop(row: fedblur.Row) -> None:
        raise KeyboardInterrupt

    fedblur.train(config(2), federation=people(), out=tmp_path / "a", machine=CPU)
    with pytest.raises(KeyboardInterrupt):
        fedblur.train(config(2), federation=people(), out=tmp_path / "b", machine=CPU, watch=stop)
    population = budget(5)
    fedblur.train(config(1), federation=people("ward-3"), out=tmp_path / "c", machine=CPU)
    assert sorted((entry.spent, entry.reserved) for entry in population.entries()) == [(1, 1), (1, 2), (2, 2)]
    with pytest.raises(PrivacyError, match="population ward-3 has a budget"):
        fedblur.train(config(1), federation=people("ward-3"), out=tmp_path / "d", machine=CPU)
    fedblur.resume(tmp_path / "b", federation=people(), machine=CPU, tell=lambda note: None)
    assert sorted((entry.spent, entry.reserved) for entry in population.entries()) == [(1, 1), (2, 2), (2, 2)]


def test_every_data_set_that_comes_with_fedblur__is_public() -> None:
    from fedblur.core.registry import parts

    own = {name: part for name, part in parts("dataset").items() if part.__module__.startswith("fedblur.")}
    assert not own.pop("table").public  # type: ignore[attr-defined]  # a user's own rows
    assert len(own) == 7
    assert all(part.public for part in own.values())  # type: ignore[attr-defined]


def test_name__does_not_change_what_a_configuration_is() -> None:
    from fedblur.core.config import config_hash

    assert config_hash(config(1, population="ward-3")) == config_hash(config(1))
    assert population_of("ward-3", people()).name == "ward-3"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="give one of them"):
        population_of("ward-3", people("ward-4"))


# --- commands ---


def test_commands__show_who_spent_what(tmp_path: Path) -> None:
    assert json.loads(invoke("population", "list", "--json")) == []
    invoke("population", "budget", "ward-3", "--epsilon", 4, "--delta", DELTA)
    fedblur.train(config(2), federation=people("ward-3"), out=tmp_path / "a", machine=CPU)
    shown = json.loads(invoke("population", "show", "ward-3", "--json"))
    (ledger,) = shown["ledgers"]
    expected = accounting.epsilon(events.Gaussian(SIGMA), 2, DELTA)
    assert (ledger["run"], ledger["kind"], ledger["spent"]) == (str(tmp_path / "a"), "run", 2)
    assert ledger["epsilon_alone"] == shown["epsilon"] == shown["total"]["spent"]["pld"] == pytest.approx(expected)
    assert shown["total"]["spent"]["rdp"] == pytest.approx(accounting.epsilon(events.Gaussian(SIGMA), 2, DELTA, "rdp"))
    assert shown["total"]["spent"]["adaptive"] > shown["total"]["spent"]["rdp"]
    text = invoke("population", "show", "ward-3")
    assert "population ward-3: ε = " in text
    assert "of 4 at δ = 0.01, 1 run" in text
    assert "ward-3" in invoke("population", "list")
    assert "nothing to change" in invoke("population", "reconcile", "ward-3")
    assert "known: ward-3" in invoke("population", "show", "ward-4", status=2)
    assert "must be above 0" in invoke("population", "budget", "ward-3", "--epsilon", 0, "--delta", DELTA, status=2)


def test_close__gives_a_run_up_for_good(tmp_path: Path) -> None:
    budget(4)

    def stop(row: fedblur.Row) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedblur.train(config(4), federation=people("ward-3"), out=tmp_path / "a", machine=CPU, watch=stop)
    assert "3 releases are free again" in invoke("population", "close", tmp_path / "a")
    with pytest.raises(PrivacyError, match="was given up"):
        fedblur.resume(tmp_path / "a", federation=people("ward-3"), machine=CPU, tell=lambda note: None)
    fedblur.train(config(3), federation=people("ward-3"), out=tmp_path / "b", machine=CPU)
    assert "no population knows" in invoke("population", "close", tmp_path / "c", status=2)


def test_reconcile__counts_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    old = Path(__file__).parents[1] / "fixtures/version_0_2/private"
    shutil.copytree(old, tmp_path / "old")
    said = invoke("population", "reconcile", "ward-3", tmp_path / "old")
    assert "releases are counted from now on" in said
    (entry,) = Population("ward-3").entries()
    assert entry.spent == len(read_spends(Chain(tmp_path / "old/ledger.jsonl").read()))


# --- real processes ---


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and file locks")
@pytest.mark.parametrize(("processes", "kills"), [(12, 6), pytest.param(60, 40, marks=pytest.mark.long)])
def test_processes__that_are_killed_never_overspend_together(processes: int, kills: int, tmp_path: Path) -> None:
    """Each process spends in a folder of its own; some are killed and go on. The ledgers at the end are the judge."""
    room = 2 * processes  # of 5 · processes that are asked for
    population = Population("crowd", tmp_path / "state")
    population.set_limit(Limit(1.0001 * accounting.epsilon(spenders.EVENT, room, spenders.DELTA), spenders.DELTA))
    facts = spenders.race(tmp_path, processes, kills)
    ledgers = [Chain(path) for path in tmp_path.glob("run-*/ledger.jsonl")]
    rows = {chain.path.parent: len(read_spends(chain.read())) for chain in ledgers}
    released = {folder: spenders.released(folder) for folder in tmp_path.glob("run-*")}
    assert facts["killed"] >= kills
    assert all(count <= rows.get(folder, 0) for folder, count in released.items())
    assert sum(rows.values()) <= room, "overspent"
    assert sum(rows.values()) <= sum(entry.spent for entry in population.entries())
    assert sum(entry.reserved for entry in population.entries()) <= room
    total = totals.smallest(totals.counted({spenders.EVENT: sum(rows.values())}), spenders.DELTA)
    assert total is not None
    limit = population.limit()
    assert limit is not None
    assert total <= limit.epsilon
    assert facts["complete"] + facts["refused"] > 0
    assert sum(released.values()) <= sum(rows.values())
