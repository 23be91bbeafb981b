"""What a round released, as data: it survives the ledger unchanged, or it is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedblur.core.errors import PrivacyError
from fedblur.privacy.events import (
    Composed,
    Event,
    FixedSizeSampled,
    Gaussian,
    PoissonSampled,
    SelfComposed,
    flatten,
    from_json,
    to_json,
)

gaussians = st.builds(Gaussian, st.floats(0, 1e6))
releases = st.one_of(
    gaussians,
    st.builds(PoissonSampled, st.floats(1e-9, 1), gaussians),
    st.builds(
        lambda n, k, inner: FixedSizeSampled(n + k, k, inner),
        st.integers(0, 99),
        st.integers(1, 9),
        gaussians,
    ),
)
events = st.recursive(
    releases,
    lambda inner: st.one_of(
        st.builds(SelfComposed, inner, st.integers(1, 1000)),
        st.builds(lambda parts: Composed(tuple(parts)), st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=4,
)


@given(events)
def test_json__round_trip_through_text(event: Event) -> None:
    assert from_json(json.loads(json.dumps(to_json(event)))) == event


def test_json__says_kind_and_every_field() -> None:
    assert to_json(PoissonSampled(0.04, Gaussian(2.178))) == {
        "kind": "poisson_sampled",
        "rate": 0.04,
        "inner": {"kind": "gaussian", "noise_multiplier": 2.178},
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "gausian", "noise_multiplier": 1.0}, "did you mean 'gaussian'"),
        ({"kind": 3}, "event kind 3 is unknown"),
        ({"kind": ["gaussian"]}, "is unknown"),
        ({"noise_multiplier": 1.0}, "event kind None is unknown"),
        ("gaussian", "must be a table with a kind"),
        ({"kind": "gaussian", "noise_multiplier": 1.0, "sensitivity": 2.0}, "unknown field 'sensitivity'"),
        ({"kind": "gaussian"}, "lacks the field 'noise_multiplier'"),
        ({"kind": "gaussian", "noise_multiplier": "1.0"}, "noise_multiplier='1.0' must be float"),
        ({"kind": "gaussian", "noise_multiplier": True}, "must be float"),
        ({"kind": "gaussian", "noise_multiplier": -1}, "noise_multiplier=-1.0 must be 0 or more"),
        ({"kind": "gaussian", "noise_multiplier": float("nan")}, "must be 0 or more"),
        ({"kind": "poisson_sampled", "rate": 0.1, "inner": 3}, "must be a table with a kind"),
        ({"kind": "poisson_sampled", "rate": 0.1, "inner": {"kind": "laplace"}}, "'laplace' is unknown"),
        ({"kind": "composed", "events": {"kind": "gaussian"}}, "events="),
        (
            {"kind": "self_composed", "inner": {"kind": "gaussian", "noise_multiplier": 1}, "count": 2.0},
            "must be int",
        ),
    ],
)
def test_invariant_4__unknown_event_is_refused_when_read(data: object, message: str) -> None:
    with pytest.raises(PrivacyError, match=message) as caught:
        from_json(data)
    assert "\n" not in str(caught.value)


def test_invariant_4__unknown_event_is_refused_when_written() -> None:
    @dataclass(frozen=True)
    class Unheard(Event):
        scale: float = 1.0

    with pytest.raises(PrivacyError, match="Unheard is not a kind"):
        to_json(Unheard())

    @dataclass(frozen=True)
    class Disguised(Gaussian):
        """Inherits the kind, but is not what from_json would make of it."""

    with pytest.raises(PrivacyError, match="Disguised is not a kind"):
        to_json(Disguised(1.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonSampled(0.0, Gaussian(1)), r"rate=0.0 must be in \(0, 1\]"),
        (lambda: PoissonSampled(1.3, Gaussian(1)), r"rate=1.3 must be in \(0, 1\]"),
        (lambda: FixedSizeSampled(10, 11, Gaussian(1)), "cohort=11 must be between 1 and population=10"),
        (lambda: FixedSizeSampled(10, 0, Gaussian(1)), "cohort=0"),
        (lambda: SelfComposed(Gaussian(1), 0), "count=0 must be 1 or more"),
        (lambda: Composed(()), "no events"),
        (lambda: Gaussian(float("inf")), "finite"),
    ],
)
def test_event__nonsense_is_refused(make: type, message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        make()


def test_flatten__nesting_makes_no_difference() -> None:
    a, b = Gaussian(1.0), PoissonSampled(0.1, Gaussian(2.0))
    nested = SelfComposed(Composed((a, SelfComposed(Composed((b, a)), 3))), 2)
    assert flatten(nested) == {a: 8, b: 6}
    assert flatten(b, 5) == {b: 5}
