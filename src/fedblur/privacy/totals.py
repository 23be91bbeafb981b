"""Totals: what releases about the same clients cost together. In: events. Out: one event, and its epsilon.

Two bounds for plans that were fixed beforehand, PLD and RDP at the best of many orders, and one that also holds if the
noise and rate of later releases were chosen by looking at earlier ones: RDP at one of three orders that were fixed
before the first release, each with a third of delta (a privacy filter, Feldman and Zrnic 2021; docs/populations.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from fedblur.core.errors import PrivacyError
from fedblur.privacy import accounting
from fedblur.privacy.accountants import ORDERS
from fedblur.privacy.accounting import ACCOUNTANTS, Accountant
from fedblur.privacy.events import Composed, Event, SelfComposed, demand_stream, flatten


def together(released: Iterable[Event]) -> Event | None:
    """Join releases about the same clients into one event; equal ones are counted, so that they compose quickly."""
    counts: dict[Event, int] = {}
    for event in released:
        counts[event] = counts.get(event, 0) + 1
    return counted(counts)


def counted(counts: Mapping[Event, int]) -> Event | None:
    """Join releases, each with its count, into one event; None where there are none.

    Their order is that of their text: the accountants remember what they computed, and find the same total again.
    A release that names no stream is refused: two runs' would count as those of one run.
    """
    for event in counts:
        demand_stream(event)
    ordered = sorted(((event, count) for event, count in counts.items() if count), key=lambda item: repr(item[0]))
    parts = tuple(SelfComposed(event, count) for event, count in ordered)
    return Composed(parts) if parts else None


def spent(event: Event | None, delta: float, accountant: Accountant) -> float | None:
    """Return the epsilon of everything together; None if the accountant refuses these events."""
    if event is None:
        return 0.0
    releases = flatten(event)
    (one, count), *others = releases.items()
    try:
        if others:
            return accounting.epsilon(event, 1, delta, accountant)
        return accounting.epsilon(one, count, delta, accountant)  # as a run asks for its own: it is remembered
    except PrivacyError:
        return None


def smallest(event: Event | None, delta: float) -> float | None:
    """Return the smallest epsilon that an accountant proves; None if none has a bound."""
    known = [value for name in ACCOUNTANTS if (value := spent(event, delta, name)) is not None]
    return min(known, default=None)


def fits(event: Event | None, epsilon: float, delta: float) -> bool:
    """Return whether an accountant proves that this stays within a budget. The quick one is asked first."""
    return any((value := spent(event, delta, name)) is not None and value <= epsilon for name in ("rdp", "pld"))


def orders_for(epsilon: float, delta: float) -> tuple[float, ...]:
    """Return three Rényi orders that follow from a budget alone.

    The first allows most Gaussian releases within it. Sampled releases with little noise need lower ones: half as far
    from 1, and a quarter.
    """
    best = max(ORDERS, key=lambda order: (epsilon - _overhead(order, delta)) / order)
    wanted = [1 + (best - 1) / share for share in (1, 2, 4)]
    return tuple(min(ORDERS, key=lambda order: abs(math.log((order - 1) / (each - 1)))) for each in wanted)


def _overhead(order: float, delta: float) -> float:
    """Return what the step from Rényi to (ε, δ) adds (Canonne, Kamath and Steinke 2020, proposition 12)."""
    return math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def spent_adaptively(event: Event | None, orders: tuple[float, ...], delta: float) -> float | None:
    """Return the epsilon at a few fixed orders, which holds however the releases were chosen; None without a bound."""
    if event is None:
        return 0.0
    try:
        return accounting.epsilon_at_orders(event, orders, delta)
    except PrivacyError:
        return None
