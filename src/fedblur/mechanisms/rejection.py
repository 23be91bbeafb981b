"""What exact samplers share: alias tables in whole numbers, proposals until every place is filled, lanes and threads.

A sampler is a function that makes proposals from random words. A place keeps the first proposal that is accepted, so
what it holds follows the law that an accepted proposal has. The result depends on the key alone: coordinates are drawn
in groups of a constant size, each from its own lane, however many threads there are.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedblur.rng import Keystream, Lane

# Floating point only sorts out the clear cases: a comparison is trusted if it holds with this margin, else it is
# decided with rational numbers. More than twice the relative error of an acceptance probability, and four times the
# absolute error of the 64 bits that it is compared with.
MARGIN, OPEN = 2.0**-40, 2.0**-62
ROUNDING = 2.0**-48  # relative error of what is rounded to a whole number
# At least what the samplers lack beyond 32 standard deviations: 2·Φ(−32) = 1.1e-224 of a Gaussian, 2·exp(−512) of a
# discrete Gaussian or a Poisson variable (Chernoff).
TAIL = 2.0**-737
TOTAL = 2**63  # what a table's weights add up to

_LANE = 2**15  # coordinates drawn together: their arrays fit into a core's cache
_AHEAD = 2**15  # coordinates from which a draw is worth a thread
_THREADS = 4

Values = NDArray[np.int64]
Words = NDArray[np.uint64]
Propose = Callable[
    [Words, Lane], tuple[Values, NDArray[np.bool_]]
]  # [3, n] words → values, and whether each is accepted


def aliases(weights: list[int]) -> tuple[list[int], list[int]]:
    """Divide bins among columns of equal weight, at most two bins in each (Walker 1977, Vose 1991).

    Below cut[column] it is the column's own bin, from there on its alias. The weights add up to TOTAL.
    """
    size = TOTAL // len(weights)
    left, cut, alias = list(weights), [size] * len(weights), list(range(len(weights)))
    small = [i for i, weight in enumerate(left) if weight < size]
    large = [i for i, weight in enumerate(left) if weight > size]
    while small:
        light, heavy = small.pop(), large[-1]
        cut[light], alias[light] = left[light], heavy
        left[heavy] -= size - left[light]
        if left[heavy] <= size:
            large.pop()
            if left[heavy] < size:
                small.append(heavy)
    return cut, alias


def draw(propose: Propose, count: int, source: Keystream, threads: int = 1) -> Values:
    """Draw `count` independent values."""
    found = np.zeros(count, dtype=np.int64)
    lanes = [(found[first : first + _LANE], first // _LANE) for first in range(0, count, _LANE)]
    if threads == 1 or len(lanes) == 1:
        for part, number in lanes:
            _fill(part, propose, source.lane(number))
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda lane: _fill(lane[0], propose, source.lane(lane[1])), lanes))
    return found


def begin(work: Callable[[int], Values], count: int) -> Callable[[], Tensor]:
    """Start `work(threads)` beside what the caller does next; call the result to wait for its values, int64."""
    if count < _AHEAD:
        return lambda: torch.from_numpy(work(1))
    pool = ThreadPoolExecutor(1, "noise")
    coming: Future[Values] = pool.submit(work, min(_THREADS, -(-count // _LANE)))
    pool.shutdown(wait=False)
    return lambda: torch.from_numpy(coming.result())


def _fill(found: Values, propose: Propose, lane: Lane) -> None:
    """Propose for every place, then again for those that were rejected, until none is left."""
    places: NDArray[np.intp] | slice = slice(None)
    count = len(found)
    while count:
        values, accepted = propose(lane.words(3 * count).reshape(3, count), lane)
        found[places] = values
        rejected = np.flatnonzero(~accepted)
        places = rejected if isinstance(places, slice) else places[rejected]
        count = len(rejected)
