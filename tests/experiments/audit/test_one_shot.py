"""Canaries are clients: sampled, counted, bounded and summed like all others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedblur.core.config import from_dict
from fedblur.core.errors import ConfigError
from fedblur.core.rng import Seeded
from fedblur.engines import LocalEngine
from fedblur.experiments.audit import audit
from fedblur.experiments.audit.canaries import CanaryEngine, Directions
from fedblur.privacy.clipping import Message
from fedblur.privacy.mechanisms.gaussian import Gaussian
from tests.privacy.test_clipping import exact_norm
from tests.worlds import CPU, SmallCnn, job_for, packed

SMALL = {"rounds": 2, "clients": 30, "epsilon": 4.0, "sample_rate": 0.5, "local": {"steps": 1}}


def engines() -> tuple[LocalEngine, CanaryEngine, Directions]:
    job = job_for(SmallCnn())
    inner = LocalEngine(packed([5, 3, 8, 4]), CPU, vectorise=True, block_size=3)
    directions = Directions(7, 10, job.layout.total, CPU)
    return inner, CanaryEngine(inner, 4, directions), directions


def test_directions__are_unit_vectors_that_depend_on_their_number_alone() -> None:
    many, few = Directions(7, 50, 2000, CPU), Directions(7, 5, 2000, CPU)
    rows = many.rows([3, 1])
    assert torch.equal(rows, few.rows([3, 1]))
    assert torch.equal(rows, many._made([3, 1]))  # as they are made when they are too many to be kept
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(2))
    vector = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    cosines = many.cosines(vector)
    assert float(cosines[3]) == pytest.approx(float(rows[0] @ vector / vector.norm()), abs=1e-6)
    assert float(cosines.std()) == pytest.approx(2000**-0.5, rel=0.35)


def test_canaries__are_clipped_like_clients_and_point_where_they_should() -> None:
    _, engine, directions = engines()
    job = job_for(SmallCnn(), clip_norm=0.2)
    blocks = list(engine.map_clients(job, torch.tensor([1, 3, 5, 9, 13]), Seeded.root(0)))
    rows = torch.cat([block.bounded.value for block in blocks])
    assert len(rows) == 5
    assert all(exact_norm(row) <= 0.2 for row in rows)
    torch.testing.assert_close(rows[2:], 0.2 * directions.rows([1, 5, 9]), rtol=1e-5, atol=1e-8)
    assert float(blocks[-1].norms.min()) > 1.9  # before the clip they are ten times too long


def test_canaries__obey_a_public_support() -> None:
    _, engine, _ = engines()
    job = job_for(SmallCnn(), clip_norm=0.2)
    support = torch.arange(0, job.layout.total, 4)
    masked = type(job)(job.forward, job.layout, job.start, job.local, job.methods, 0.2, Message("clip", support))
    (block,) = engine.map_clients(masked, torch.tensor([6]), Seeded.root(0))
    assert block.bounded.value.shape == (1, len(support))
    assert 0.199 < exact_norm(block.bounded.value[0]) <= 0.2


def test_real_clients__are_not_touched_by_canaries() -> None:
    inner, engine, _ = engines()
    job = job_for(SmallCnn())
    alone = torch.cat([block.bounded.value for block in inner.map_clients(job, torch.arange(4), Seeded.root(0))])
    mixed = [block.bounded.value for block in engine.map_clients(job, torch.tensor([0, 1, 2, 3, 4]), Seeded.root(0))]
    torch.testing.assert_close(torch.cat(mixed)[:4], alone)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": ["blur", "lus", "sam"]},
        {"mechanism": "ddgauss", "accountant": "rdp"},
        {"mechanism": {"name": "ddgauss", "mode": "exact"}, "accountant": "rdp"},
        {"mechanism": "skellam", "accountant": "rdp"},
        {"mask": "random", "server": "momentum", "averaging": "ema"},
        {"clipping": {"name": "adaptive", "bit_noise": 20.0}},
        {"bounding": "normalise", "model": "mlp"},
        {"sampling": "fixed", "accountant": "rdp"},
    ],
    ids=str,
)
def test_audit__runs_on_whatever_is_registered(tmp_path: Path, changes: dict[str, object]) -> None:
    found = audit(from_dict({**SMALL, **changes, "seed": 0}), tmp_path, canaries=100, held_out=100)
    facts = found.facts()
    assert facts["clients"] == 30
    assert "130 clients" in facts["sampling"]  # canaries count
    assert facts["delta"] == pytest.approx(1 / 130)
    assert found.claimed == pytest.approx(4.0, rel=0.01)
    assert {attack.name for attack in found.attacks} == {"final model", "all iterates"}
    assert all(np.isfinite(attack.seen).all() for attack in found.attacks)
    assert found.verdict in ("below", "undecided", "ABOVE")
    checks = {check.name: check for check in found.checks}
    assert checks["messages fit the noise"].p_value == 1
    assert not any(check.broken for check in found.checks), found.checks
    assert ("variance of the noise" in checks) == ("mechanism" not in changes)


def test_audit__spends_epsilon_in_a_ledger_of_its_own(tmp_path: Path) -> None:
    for name in ("ledger.jsonl", "ledger-2.jsonl"):
        audit(from_dict(SMALL), tmp_path, canaries=100, held_out=100)
        assert len((tmp_path / name).read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "knn-dpfl"}, "sends votes, not updates"),
        ({"method": "fedavg", "epsilon": None}, "nothing to audit"),
    ],
)
def test_audit__refuses_what_it_cannot_attack(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    table = {key: value for key, value in {**SMALL, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        audit(from_dict(table), tmp_path)
    with pytest.raises(ConfigError, match="canaries=99 must be at least 100"):
        audit(from_dict(SMALL), tmp_path, canaries=99)


def test_audit__what_its_own_run_shows_of_the_noise_is_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise 10 % too small is far below what canaries show; the run's own releases show it."""
    draw = Gaussian.draw
    monkeypatch.setattr(Gaussian, "draw", lambda *args: lambda: (draw(*args)().double() * 0.9).round().long())
    found = audit(from_dict({**SMALL, "rounds": 8, "seed": 0}), tmp_path, canaries=100, held_out=100)
    assert found.verdict == "BROKEN"
    assert [check.name for check in found.checks if check.broken] == ["variance of the noise"]


def test_audit__rounds_that_are_aborted_release_nothing(tmp_path: Path) -> None:
    """An aborted round is not the release before it, heard once more."""
    mechanism = {"name": "ddgauss", "mode": "exact", "min_cohort": 65}
    config = from_dict({**SMALL, "rounds": 6, "mechanism": mechanism, "accountant": "rdp", "seed": 1})
    found = audit(config, tmp_path, canaries=100, held_out=100)
    assert all(np.isfinite(attack.seen).all() for attack in found.attacks)
    none = from_dict({**SMALL, "mechanism": {**mechanism, "min_cohort": 129}, "accountant": "rdp", "seed": 1})
    with pytest.raises(ConfigError, match="every round was aborted"):
        audit(none, tmp_path, canaries=100, held_out=100)
