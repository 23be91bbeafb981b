"""No client touches another's message, in each engine; the audit sees a difference of one bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedblur.experiments.audit.isolation as isolation
from fedblur.core.config import from_dict
from fedblur.core.errors import ConfigError
from fedblur.engines import LocalEngine, WorkerEngine
from fedblur.experiments.audit import check_isolation
from fedblur.privacy.clipping import Bounded
from fedblur.training.machine import Machine

CHAOTIC = {"method": "blur+lus", "model": {"name": "mlp", "hidden": [16]}, "local": {"steps": 8, "learning_rate": 1.0}}


@pytest.mark.parametrize("engine", ["vectorised", "sequential"])
@pytest.mark.parametrize(
    "settings", [{}, CHAOTIC, {"mask": "random", "clipping": "adaptive", "bounding": "normalise"}], ids=str
)
def test_isolation__nobody_changes_another_message_and_the_sum_moves_by_s_at_most(
    engine: Any, settings: dict[str, Any]
) -> None:
    checks = check_isolation(from_dict({"rounds": 2, **settings}), Machine(device="cpu", engine=engine))
    assert [check.name for check in checks] == ["others' messages", "sensitivity of the sum"]
    assert not any(check.broken for check in checks), checks


def test_isolation__one_bit_of_one_other_client_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client's last coordinate moves by one unit in the last place if the cohort's size is even."""
    honest = WorkerEngine.map_clients

    def nudged(self: WorkerEngine, job: Any, ids: Any, rng: Any) -> Any:
        for number, block in enumerate(honest(self, job, ids, rng)):
            rows = block.bounded.value.clone()
            if not number and len(ids) % 2 == 0 and len(ids) > 2:
                rows[0, -1] = torch.nextafter(rows[0, -1], torch.tensor(0.0))
            yield type(block)(Bounded(rows, block.bounded.l2_bound), block.trained_norms, block.norms)

    monkeypatch.setattr(WorkerEngine, "map_clients", nudged)
    first, _ = check_isolation(from_dict({"rounds": 1}), Machine(device="cpu", engine="sequential"))
    assert first.broken
    assert "1 other clients send another message" in first.words


def test_isolation__a_target_that_counts_twice_moves_the_sum_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = isolation.Gaussian.accumulate
    monkeypatch.setattr(isolation.Gaussian, "accumulate", lambda self, *args: 2 * honest(self, *args))
    _, second = check_isolation(from_dict({"rounds": 1}), Machine(device="cpu", engine="sequential"))
    assert second.broken


def test_isolation__runs_in_the_engine_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()
    honest = LocalEngine.map_clients

    def noted(self: LocalEngine, *args: Any) -> Any:
        used.add("vectorised" if self.vectorise else "one by one")
        return honest(self, *args)

    monkeypatch.setattr(LocalEngine, "map_clients", noted)
    check_isolation(from_dict({"rounds": 1}), Machine(device="cpu", engine="vectorised"))
    assert used == {"vectorised"}


def test_isolation__of_random_rounding_the_sum_is_not_compared_and_it_says_so() -> None:
    config = from_dict({"rounds": 1, "mechanism": "ddgauss", "accountant": "rdp"})
    _, second = check_isolation(config, Machine(device="cpu", engine="sequential"))
    assert second.p_value is None
    assert "rounding at random" in second.words


def test_isolation__voting_is_refused() -> None:
    with pytest.raises(ConfigError, match="sends votes"):
        check_isolation(from_dict({"method": "knn-dpfl"}))
