"""What a cell will cost: by results of its kind, else by measurements, else unknown."""

from __future__ import annotations

import json

import pytest

from fedblur.core.config import Config, canonical, from_dict, to_dict
from fedblur.experiments.cost_model import estimate, program

EMNIST = {
    "dataset": "emnist",
    "model": "cnn",
    "clients": 3400,
    "sample_rate": 0.04,
    "rounds": 1000,
    "local": {"steps": 30, "batch_size": 64, "learning_rate": 0.03},
}


def _result(config: Config, seconds: float, machine: str = "vectorised on cuda, bf16") -> dict:
    stored = json.loads(canonical(to_dict(config)))
    return {"config": stored, "seconds": seconds, "rounds": config.rounds, "machine": machine}


def test_estimate__of_the_measured_round_is_the_measurement() -> None:
    assert estimate(from_dict(EMNIST), 3400, "cuda") == pytest.approx(60.6 + 4, rel=0.1)  # 60.6 ms a round + start


def test_estimate__is_unknown_where_nobody_measured() -> None:
    assert estimate(from_dict(EMNIST), 3400, "cpu") is None
    assert estimate(from_dict({**EMNIST, "model": "logistic"}), 3400, "cuda") is None
    assert estimate(from_dict({**EMNIST, "method": "ae-dpfl"}), 3400, "cuda") is None


def test_estimate__follows_results_of_the_same_kind_and_device() -> None:
    done = from_dict({**EMNIST, "rounds": 300, "epsilon": 2, "seed": 5})
    wanted = from_dict({**EMNIST, "epsilon": 8})
    assert estimate(wanted, 3400, "cuda", [_result(done, 30)]) == pytest.approx(104)
    assert estimate(wanted, 3400, "cpu", [_result(done, 30)]) is None
    other = from_dict({**EMNIST, "sample_rate": 0.2})
    assert estimate(other, 3400, "cuda", [_result(done, 30)]) > 500


def test_estimate__follows_results_of_earlier_versions_which_lack_later_keys() -> None:
    done = _result(from_dict({**EMNIST, "rounds": 300, "epsilon": 2}), 30, "sequential, 2 workers on cpu")
    for key in ("optimizer", "betas", "adam_epsilon"):
        del done["config"]["local"][key]
    assert estimate(from_dict({**EMNIST, "epsilon": 8}), 3400, "cpu", [done]) == pytest.approx(104)
    adam = from_dict({**EMNIST, "local": {**EMNIST["local"], "optimizer": "adam"}})
    assert estimate(adam, 3400, "cpu", [done]) is None


def test_program__is_shared_by_cells_that_differ_in_noise_or_sparsity_only() -> None:
    def of(method: object, epsilon: float = 2) -> object:
        return program(from_dict({**EMNIST, "method": method, "epsilon": epsilon}))

    lus = [[{"name": "lus", "sparsity": c}] for c in (0.1, 0.9)]
    assert of([]) == of([], 8)
    assert of(lus[0]) == of(lus[1])
    assert of("blur") != of([])


def test_estimate__learns_from_other_runs_of_the_same_model() -> None:
    done, wanted = from_dict({**EMNIST, "rounds": 300}), from_dict({**EMNIST, "method": "blur"})
    unaided = estimate(wanted, 3400, "cuda")
    swift = _result(done, 0.3 * (unaided - 4) / 2)  # half of what the figures say
    assert estimate(wanted, 3400, "cuda", [swift]) - 4 == pytest.approx((unaided - 4) / 2, rel=1e-6)
    votes = _result(from_dict({**EMNIST, "method": "ae-dpfl"}), 1.0)
    assert estimate(wanted, 3400, "cuda", [votes]) == unaided


def test_estimate__the_first_run_of_a_process_does_not_count_its_compiling() -> None:
    done = from_dict({**EMNIST, "rounds": 300})
    both = [_result(done, 75), _result(done, 30)]
    assert estimate(from_dict(EMNIST), 3400, "cuda", both) == pytest.approx(104)
    assert estimate(from_dict(EMNIST), 3400, "cuda", both[::-1]) == pytest.approx(104)
