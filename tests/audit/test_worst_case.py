"""The worst-case check comes close to the accountant's epsilon; the planted bugs (tests/planted) push it above."""

from __future__ import annotations

import pytest

from fedblur.audit import WorstCase, check_worst_case
from fedblur.errors import ConfigError


@pytest.mark.slow
def test_worst_case__10000_releases_bound_epsilon_at_60_percent_of_the_claim_or_more() -> None:
    found = check_worst_case(WorstCase(seed=0), 10_000)
    assert found.repetitions >= 10_000
    assert 0.6 * found.claimed <= found.lower_bound <= found.claimed
    assert found.best == "projection"


def test_worst_case__works_with_noise_from_the_operating_system() -> None:
    assert not check_worst_case(WorstCase(), 1000).broken


def test_worst_case__nonsense_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="repetitions=100 must be at least 400"):
        check_worst_case(WorstCase(), 100)
    with pytest.raises(ConfigError, match="claims nothing"):
        check_worst_case(WorstCase(epsilon=float("inf")))
