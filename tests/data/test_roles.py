"""Who trains and who validates follows from each client's own id: adding one changes nobody else's role."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedblur.core.config import Config
from fedblur.core.errors import ConfigError, DataError, RunError
from fedblur.data.cache import _load, _save
from fedblur.data.federation import federation_from_arrays
from fedblur.data.holdout import hold_out, with_many_samples
from fedblur.data.packed import PackedFolder, export
from fedblur.data.population import Federation, Packed
from fedblur.data.roles import divide, identities
from fedblur.data.source import Split, Stored
from fedblur.training.loop import train
from fedblur.training.resume import resume
from fedblur.training.setup import held_out

PEOPLE = [f"f{number:04d}" for number in range(60)]


def role_of(names: list[str], **settings: Any) -> dict[str, str]:
    training, validation = divide(names, **{"share": 0.3, "seed": 0} | settings)
    found = {names[client]: "trains" for client in training.tolist()}
    return found | {names[client]: "validates" for client in validation.tolist()}


@pytest.mark.parametrize("place", [0, 17, 60])
def test_roles__adding_a_client_changes_nobody_elses(place: int) -> None:
    before = role_of(PEOPLE)
    after = role_of([*PEOPLE[:place], "someone else", *PEOPLE[place:]])
    assert set(before.values()) == {"trains", "validates"}
    assert {name: after[name] for name in PEOPLE} == before
    assert after.keys() - before.keys() == {"someone else"}


def test_roles__about_the_share_validate_and_the_seed_decides_who() -> None:
    names = [str(client) for client in range(10_000)]
    training, validation = divide(names, 0.1, seed=0)
    assert len(validation) == pytest.approx(1000, abs=4 * 30)  # four standard deviations
    assert sorted([*training.tolist(), *validation.tolist()]) == list(range(10_000))
    assert divide(names, 0.1, seed=1)[1].tolist() != validation.tolist()
    assert set(validation.tolist()) <= set(divide(names, 0.2, seed=0)[1].tolist())
    assert divide(names, 0.0, seed=0)[1].tolist() == []


def test_roles__a_cap_leaves_the_validation_clients_and_drops_one_for_one_who_joins() -> None:
    every, capped = divide(PEOPLE, 0.3, 0), divide(PEOPLE, 0.3, 0, most=20)
    assert capped[1].tolist() == every[1].tolist()
    assert len(capped[0]) == 20
    assert set(capped[0].tolist()) < set(every[0].tolist())
    names = {PEOPLE[client] for client in capped[0].tolist()}
    joined = [*PEOPLE, "someone else"]
    assert len({joined[client] for client in divide(joined, 0.3, 0, most=20)[0].tolist()} - names) <= 1


def own(people: list[str], /, **changes: Any) -> Federation:
    """Two samples of each client; a sample holds its client's name."""
    x = np.array([[hash_of(name), 0.0] for name in people for _ in range(2)])
    owners = np.repeat(np.arange(len(people)), 2)
    settings: dict[str, Any] = {"classes": 2, "validation_share": 0.3, "names": people} | changes
    return federation_from_arrays(x, np.zeros(len(x), dtype=int), owners, x[:2], np.array([0, 1]), **settings)


def hash_of(name: str) -> float:
    return float(int(identities([name])[0]) % 100_003)


def trains(data: Federation) -> set[float]:
    assert isinstance(data.train, Packed)
    return set(data.train.samples().x[:, 0].tolist())


def test_arrays__a_client_who_joins_changes_nobody_elses_role() -> None:
    one, more = own(PEOPLE), own(["someone else", *PEOPLE])  # all numbers move by one
    assert trains(more) - trains(one) <= {hash_of("someone else")}
    assert trains(one) <= trains(more)
    assert one.validation_clients > 0


def test_arrays__without_names_roles_follow_numbers() -> None:
    one, more = own(PEOPLE, names=None), own([*PEOPLE, "someone else"], names=None)
    assert trains(more) - trains(one) <= {hash_of("someone else")}
    assert trains(one) <= trains(more)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": PEOPLE[:-1]}, "names has 59 entries, 59 of them different, for 60 clients"),
        ({"names": ["a"] * 60}, "names has 60 entries, 1 of them different"),
        ({"validation_share": 1e-6}, "gives no validation client: each is drawn on its own; raise it"),
        ({"validation_share": 1 - 1e-6}, "leaves none to train; lower it"),
    ],
)
def test_arrays__names_and_shares_that_do_not_do_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        own(PEOPLE, **changes)
    assert "\n" not in str(caught.value)


def test_held_out__without_validation_clients_says_to_raise_the_share() -> None:
    with pytest.raises(ConfigError, match=r"raise validation_share=0\.1"):
        held_out(Config(evaluate="validation"), own(PEOPLE, validation_share=0.0))


def writers(names: list[str], samples: int = 30) -> Split:
    """Each writer's samples, mixed with the others'; a pixel holds the writer and the sample's number."""
    codes = np.arange(len(names) * samples) % len(names)
    x = torch.zeros(len(codes), 1, 2, 2, dtype=torch.uint8)
    x[:, 0, 0, 0] = torch.from_numpy(np.arange(len(codes)) // len(names))
    known = sorted(names)  # sources number writers in the order of their names
    place = torch.tensor([known.index(name) for name in names])
    return Split(x, torch.zeros(len(codes), dtype=torch.int64), place[torch.from_numpy(codes)], identities(known))


def for_test(split: Split, names: list[str]) -> dict[str, set[int]]:
    """Which of each writer's samples are for test."""
    test, known = hold_out(split, 0.2)[1], sorted(names)
    assert test.writers is not None
    found: dict[str, set[int]] = {name: set() for name in names}
    for writer, number in zip(test.writers.tolist(), test.x[:, 0, 0, 0].tolist(), strict=True):
        found[known[writer]].add(number)
    return found


def test_hold_out__a_writer_who_joins_changes_nobody_elses_test_samples() -> None:
    joined = ["a first writer", *PEOPLE[:20]]
    before, after = for_test(writers(PEOPLE[:20]), PEOPLE[:20]), for_test(writers(joined), joined)
    assert all(len(numbers) == 6 for numbers in after.values())
    assert {name: after[name] for name in before} == before
    assert len({frozenset(numbers) for numbers in before.values()}) > 1


def test_writers__keep_their_ids_where_others_are_left_out(tmp_path: Path) -> None:
    """Also through the cache and an export, which know writers by number."""
    split = writers(PEOPLE[:5])
    few = split.take(torch.nonzero((split.writers != 2) | (split.x[:, 0, 0, 0] < 3)).flatten())
    kept = with_many_samples(few, 20)
    assert split.names() == tuple(str(number) for number in identities(PEOPLE[:5]).tolist())
    assert kept.names() == tuple(name for place, name in enumerate(split.names() or ()) if place != 2)
    stored = Stored({"train": kept}, 2)
    _save(tmp_path / "cached", stored)
    cached = _load(tmp_path / "cached")
    assert cached is not None
    export(stored, tmp_path / "out")
    for again in (cached, PackedFolder(tmp_path / "out").read()):
        assert again.splits["train"].names() == kept.names()


def test_writers__of_an_export_without_ids_are_called_by_their_place_in_it() -> None:
    split = writers(PEOPLE[:5])
    old = Split(split.x, split.y, split.writers)
    few = old.take(torch.nonzero((old.writers != 2) | (old.x[:, 0, 0, 0] < 3)).flatten())
    assert with_many_samples(few, 20).names() == ("0", "1", "3", "4")


def test_resume__a_run_whose_roles_were_chosen_by_lot_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints are of version 0.1: they do not say how roles were chosen."""

    def stop(row: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    def saved(data: Federation, out: Path) -> Path:
        with pytest.raises(KeyboardInterrupt):
            train(Config(rounds=2, model="logistic", seed=0), out=out, federation=data, watch=stop)
        return out

    data = own(PEOPLE)
    assert resume(saved(data, tmp_path / "new"), federation=data).summary["status"] == "complete"
    monkeypatch.setattr(sys.modules["fedblur.training.setup"], "ROLES", None)
    old = saved(data, tmp_path / "old")
    monkeypatch.undo()
    with pytest.raises(RunError, match=r"begun by fedblur 0\.1, which chose its training clients in another way"):
        resume(old, federation=data)
    everyone = own(PEOPLE, validation_share=0.0)
    assert not everyone.by_id
