"""Contracts of every mechanism that is registered: dense noise of the promised size, an event that is accounted."""

import json
import math

import pytest
import torch

from fedblur.core.registry import parts
from fedblur.core.rng import Seeded
from fedblur.privacy import accounting, events
from fedblur.privacy.clipping import clip_l2
from fedblur.privacy.mechanisms.base import Conditions, Release
from fedblur.privacy.mechanisms.correlated import CorrelatedNoise, SeededNoise
from tests.worlds import CPU


@pytest.fixture(params=sorted(parts("mechanism")))
def mechanism(request):
    return parts("mechanism")[request.param]()


def bound(mechanism, dimension: int, cohort: int, seed: int = 0):
    """The mechanism of a run that begins with this seed."""
    found = mechanism.bind(Conditions(dimension, 0.5, cohort, cohort))
    return found.started(SeededNoise(Seeded.root(seed))) if isinstance(found, CorrelatedNoise) else found


def released(mechanism, sigma: float) -> events.Event:
    """A round's event: correlated noise is released to clients who keep a distance, or it has none."""
    event = mechanism.event(sigma)
    return events.MinSeparated(5, 0, "", event) if isinstance(event, events.Correlated) else event


def release_once(mechanism, rows: torch.Tensor, sigma: float, seed: int = 0) -> torch.Tensor:
    request = Release(rows.shape[1], 0.5, sigma, len(rows), CPU)
    mechanism = bound(mechanism, rows.shape[1], len(rows), seed)
    rng = Seeded.root(seed)
    total = mechanism.accumulate([clip_l2(rows, 0.5)[0]], request, rng)
    return mechanism.release(total, request, mechanism.draw(request, rng)())


def test_mechanism__noise_is_dense_and_has_the_promised_size(mechanism) -> None:
    noisy = release_once(mechanism, torch.zeros(9, 20_000), sigma=3.0)
    assert int((noisy == 0).sum()) < 20
    assert float(noisy.double().std()) == pytest.approx(1.5, rel=0.05)


def test_mechanism__the_sum_is_unbiased(mechanism) -> None:
    rows = 0.01 * torch.randn(9, 500, generator=torch.Generator().manual_seed(0))
    mean = torch.stack([release_once(mechanism, rows, 1.0, seed).double() for seed in range(400)]).mean(0)
    assert float((mean - rows.double().sum(0)).abs().max()) < 5 * 0.5 / math.sqrt(400)


def test_mechanism__partial_sums_of_two_processes_add_up(mechanism) -> None:
    rows = 0.01 * torch.randn(8, 500, generator=torch.Generator().manual_seed(0))
    request, rng, mechanism = Release(500, 0.5, 0.0, 8, CPU), Seeded.root(0), bound(mechanism, 500, 8)
    halves = [
        mechanism.accumulate([clip_l2(part, 0.5)[0]], request, rng.child(i)) for i, part in enumerate(rows.split(4))
    ]
    result = mechanism.release(halves[0] + halves[1], request, mechanism.draw(request, rng)())
    torch.testing.assert_close(result, rows.sum(0), rtol=0, atol=1e-3)


def test_mechanism__its_event_is_accounted_and_more_noise_costs_less(mechanism) -> None:
    mechanism = bound(mechanism, 500, 9)
    weak, strong = (accounting.epsilon(released(mechanism, sigma), 10, 1e-5, "rdp") for sigma in (1.0, 4.0))
    assert 0 < strong < weak < math.inf


def test_mechanism__its_event_survives_the_ledger_and_no_noise_is_no_privacy(mechanism) -> None:
    mechanism = bound(mechanism, 500, 9)
    event = released(mechanism, 1.3)
    assert events.from_json(json.loads(json.dumps(events.to_json(event)))) == event
    assert accounting.epsilon(released(mechanism, 0.0), 1, 1e-5, "rdp") == math.inf


def test_mechanism__says_whom_to_trust(mechanism) -> None:
    assert len(mechanism.trust) > 20


def test_mechanism__notes_are_lines(mechanism) -> None:
    assert all("\n" not in note for note in bound(mechanism, 500, 9).notes(1.0))
