"""Matrices of correlated noise for a run: the server's own steps say where noise ends up, and a matrix is fitted to it.

In: a server, an average, the number of rounds, and how often a client may take part. Out: a `NoiseMatrix` with little
noise in the published models at the same privacy. Nothing here is part of the privacy argument: whatever comes out, its
sensitivity is computed from its whole numbers by `privacy/noise_matrices.py`.

    minimise sensitivity(C)² · mean_t ‖row_t(A C⁻¹)‖²,    A [rounds, rounds]: what is published after each round

For a Toeplitz C the second factor is dᵀKd / rounds: d is the power series 1 / c, K[i, j] = Σ_s (AᵀA)[s + i, s + j].
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedblur.core.cache_files import keep, read_kept
from fedblur.core.config import Config
from fedblur.core.errors import ConfigError, FedBlurError
from fedblur.core.files import cache_folder
from fedblur.privacy.mechanisms.correlated import Correlated, Kind
from fedblur.privacy.noise_matrices import UNIT, Blt, NoiseMatrix, Toeplitz, Tree, inverse_series
from fedblur.privacy.participation import Cyclic, MinSeparation, Turns
from fedblur.training.server import Averaging, Server, published

Values = NDArray[np.float64]

_FORMAT = 1  # of the files in the cache, and of how matrices are fitted
_KINDS: dict[str, Callable[..., NoiseMatrix]] = {"tree": Tree, "banded": Toeplitz, "blt": Blt}
_UNBOUNDED = 1e30  # noise of a matrix whose inverse explodes
_MOST_ROUNDS = 4096  # that a matrix is fitted to; it serves longer runs as well
_WORTHWHILE = 1e-3  # another buffer of the model's size has to take off this share of the noise
_MEMO: dict[str, NoiseMatrix] = {}


@dataclass(frozen=True)
class Workload:
    """Weights with which means of rounds add up to models."""

    weights: Values  # A [rounds, rounds]: the weight of each round's mean in the model that is published after round t
    linear: bool  # False: the server's steps are no weighted sum, and A stands for plain sums over rounds

    @property
    def note(self) -> str:
        """Return a sentence for users whose server is not linear."""
        if self.linear:
            return ""
        return "the server's steps are not linear in the means: noise is fitted to plain sums over rounds instead"


def server_workload(server: Server, averaging: Averaging | None, rounds: int) -> Workload:
    """Return what the server's own steps make of each round: momentum, falling learning rates and averages included."""
    weights = _models(server, averaging, np.eye(rounds))
    means = np.random.default_rng(0).standard_normal((rounds, 3))
    if np.allclose(weights @ means, _models(server, averaging, means), rtol=1e-9, atol=1e-9 * np.abs(weights).max()):
        return Workload(weights, linear=True)
    return Workload(np.tril(np.ones((rounds, rounds))), linear=False)


def _models(server: Server, averaging: Averaging | None, means: Values) -> Values:
    """Return the model [d] that is published after each of the rounds, whose means are [rounds, d], from zero on."""
    rounds = len(means)
    state = server.init(torch.zeros(means.shape[1], dtype=torch.float64))
    state = state if averaging is None else averaging.init(state)
    models = []
    for t, mean in enumerate(torch.from_numpy(means)):
        state = server.step(state, mean, round_=t, rounds=rounds, noise_std=0.0)
        state = state if averaging is None else averaging.update(state, round_=t, rounds=rounds)
        models.append(published(state, averaging).numpy())
    return np.stack(models)


def noise_in_models(matrix: NoiseMatrix, weights: Values, separation: int, at_most: int | None = None) -> float:
    """Return the noise of the models of all rounds, as a root mean square, in units of (S/pN) · (σ of one Gaussian)."""
    noise = float(np.sqrt(np.mean(matrix.gain(weights) ** 2)))
    return matrix.sensitivity(len(weights), separation, at_most) * noise


def optimised(
    kind: Kind,
    weights: Values,
    separation: int,
    at_most: int | None = None,
    *,
    bands: int | None = None,
    buffers: int = 4,
) -> NoiseMatrix:
    """Return the matrix of a kind that puts least noise into the models. It is kept, in memory and in the cache folder.

    `weights` is A. Groups that take turns are a separation of `groups` rounds. With amplification by sampling, what
    counts is one column's norm: at_most = 1. Noise of more rounds than `bands` is not tied together; by default that
    is `separation` for banded noise, so that a client's rounds share none, and no limit for a tree.
    """
    if (bands is not None and bands < 1) or buffers < 1:
        raise ConfigError(f"bands={bands} and buffers={buffers} must be 1 or more")
    facts = (_FORMAT, kind, len(weights), separation, at_most, bands, buffers)
    digest = hashlib.sha256(repr(facts).encode() + np.ascontiguousarray(weights).tobytes()).hexdigest()[:32]
    if digest not in _MEMO:
        folder = cache_folder()
        path = None if folder is None else folder / f"noise-{digest}.json"
        matrix = None if path is None else _load(path, kind)
        if matrix is None:
            matrix = _fitted(kind, weights, separation, at_most, bands, buffers)
            if path is not None:
                keep(path, json.dumps(asdict(matrix)).encode())
        _MEMO[digest] = matrix
    return _MEMO[digest]


def _load(path: Path, kind: Kind) -> NoiseMatrix | None:
    content = read_kept(path)
    with contextlib.suppress(ValueError, TypeError, AttributeError, FedBlurError):
        stored = json.loads(content or b"{}")
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
        return _KINDS[kind](**fields)
    return None


def _fitted(
    kind: Kind, weights: Values, separation: int, at_most: int | None, bands: int | None, buffers: int
) -> Tree | Toeplitz | Blt:
    rounds = len(weights)
    if kind == "tree":
        longest = (rounds - 1).bit_length() if bands is None else bands.bit_length() - 1
        trees = [Tree(2**power) for power in range(longest + 1)]
        return min(trees, key=lambda tree: noise_in_models(tree, weights, separation, at_most))
    loss = _Loss(weights, separation, at_most)
    if kind == "banded":
        return _fitted_bands(loss, min(bands or separation, rounds))
    return _fitted_buffers(loss, buffers)


def settled(config: Config) -> Config:
    """Return the configuration with every number of its correlated noise, fitted to its server where they are open.

    They become a part of the configuration: whoever verifies the run computes its sensitivity from the same numbers.
    """
    part, sampling = config.mechanism, config.sampling
    if not isinstance(part, Correlated) or not part.open:
        return config
    at_most: int | None = None
    if isinstance(sampling, MinSeparation):
        separation, at_most = sampling.rounds, sampling.at_most or None
    elif isinstance(sampling, Turns | Cyclic):
        separation = sampling.groups
    else:
        raise ConfigError(
            f"mechanism={part.name!r} needs a bound on how often a client takes part, and "
            f'sampling={sampling.part_name!r} gives none; set sampling = {{ name = "min_separation", rounds = 20 }}'
        )
    bands: int | None = getattr(part, "bands", 0) or None
    if isinstance(sampling, Cyclic):  # each turn of a client is a release by itself: what counts is one column
        at_most, bands = 1, min(bands or separation, separation)
    weights = server_workload(config.server, config.averaging, min(config.rounds, _MOST_ROUNDS)).weights
    buffers = getattr(part, "buffers", 4)
    return replace(
        config, mechanism=part.like(optimised(part.name, weights, separation, at_most, bands=bands, buffers=buffers))
    )


def square_root(weights: Values, bands: int) -> Toeplitz:
    """Return the first coefficients of the square root of A: near the best for one participation, and not fitted."""
    return _whole(_root_series(weights, bands))


def _root_series(weights: Values, terms: int) -> Values:
    """Return the power series √a of the means a of A's diagonals, if it never grows, or else that of sums over rounds.

    A series that grows and is cut off may have no bounded inverse.
    """
    rounds = len(weights)
    a = np.array([np.trace(weights, -lag) / (rounds - lag) for lag in range(min(terms, rounds))])
    for series in (a / a[0] if a[0] > 0 else a, np.ones(len(a))):
        root = np.ones(len(a))
        for k in range(1, len(a)):
            root[k] = (series[k] - root[1:k] @ root[k - 1 : 0 : -1]) / 2  # Σ_i root_i root_(k-i) = series_k
        if a[0] > 0 and root.min() >= 0 and np.all(np.diff(root) <= 0):
            break
    return root


class _Loss:
    """Logarithm of what is minimised, and its gradient, as a function of c [terms]; the scale of c is free."""

    def __init__(self, weights: Values, separation: int, at_most: int | None) -> None:
        self.weights, self.rounds = weights, len(weights)
        self.starts = range(0, self.rounds, separation)[:at_most]
        self.kernel = weights.T @ weights
        for i in reversed(range(self.rounds - 1)):  # sums along the diagonals, from their ends
            self.kernel[i, :-1] += self.kernel[i + 1, 1:]

    @np.errstate(all="ignore")
    def __call__(self, c: Values) -> tuple[float, Values]:
        together = np.zeros(self.rounds)
        for start in self.starts:
            together[start : start + len(c)] += c[: self.rounds - start]
        slope = np.zeros(len(c))
        for start in self.starts:
            part = together[start : start + len(c)]
            slope[: len(part)] += 2 * part
        squared = together @ together

        inverse = inverse_series(c, self.rounds)
        pulled = self.kernel @ inverse
        noise = inverse @ pulled
        if not 0 < noise < _UNBOUNDED:
            return _UNBOUNDED, np.zeros(len(c))
        # d = 1/c: a change of c_m moves d by -(d * d) shifted by m
        spread = _correlated(2 * pulled, _product(inverse, inverse))[: len(c)]
        return float(np.log(squared) + np.log(noise)), slope / squared - spread / noise


def _fitted_bands(loss: _Loss, bands: int) -> Toeplitz:
    """Minimise over steps down from one coefficient to the next: c never grows, so its inverse does not explode."""
    first = _root_series(loss.weights, bands)

    def by_steps(steps: Values) -> tuple[float, Values]:
        value, gradient = loss(np.cumsum(steps[::-1])[::-1])
        return value, np.cumsum(gradient)

    steps = _minimised(by_steps, first - np.append(first[1:], 0.0), bounds=[(0, None)] * bands)
    c = np.cumsum(steps[::-1])[::-1]
    return _whole(c / c[0])


def _fitted_buffers(loss: _Loss, buffers: int) -> Blt:
    """Minimise over decays and weights, with one buffer more as long as that takes off noise."""
    best = _fitted_points(loss, 1)
    for count in range(2, buffers + 1):
        more = _fitted_points(loss, count)
        if more[0] > best[0] + 2 * np.log1p(-_WORTHWHILE):
            break
        best = more
    _, decays, weights = best
    order = np.argsort(-decays)
    kept = [min(max(round(float(decays[i]) * UNIT), 1), UNIT - 1) for i in order]
    taken = [max(round(float(weights[i]) * UNIT), 1) for i in order]
    taken[taken.index(max(taken))] -= max(sum(taken) - (UNIT - 1), 0)  # below 1, as a configuration has it
    return Blt(tuple(kept), tuple(taken))


def _fitted_points(loss: _Loss, buffers: int) -> tuple[float, Values, Values]:
    """Return the least loss of several starts, its decays and its weights, which are at most 1 together."""
    from scipy.optimize import nnls

    lags = np.arange(loss.rounds - 1)
    target = _root_series(loss.weights, loss.rounds)[1:]

    def parts(point: Values) -> tuple[Values, Values]:
        raised = np.exp(np.append(point[buffers:], 0.0) - max(0.0, point[buffers:].max()))
        return 1 / (1 + np.exp(-point[:buffers])), raised[:-1] / raised.sum()  # 1 is shared with what no buffer has

    def by_parts(point: Values) -> tuple[float, Values]:
        decays, weights = parts(point)
        powers = decays[:, None] ** lags
        value, gradient = loss(np.append(1.0, weights @ powers))
        by_weight = powers @ gradient[1:]
        by_decay = weights * (powers[:, :-1] @ (lags[1:] * gradient[2:]))
        return value, np.append(by_decay * decays * (1 - decays), weights * (by_weight - weights @ by_weight))

    found = []
    for slowest in (0.3, 3, 30):
        fading = np.geomspace(min(slowest / loss.rounds, 0.3), 0.6, buffers)
        weights = np.maximum(nnls(((1 - fading)[:, None] ** lags).T, target)[0], 1e-3)
        weights *= min(1.0, 0.99 / weights.sum())
        start = np.append(np.log((1 - fading) / fading), np.log(weights / (1 - weights.sum())))
        point = _minimised(by_parts, start, bounds=[(-15, 14)] * buffers + [(-14, 20)] * buffers)
        found.append((by_parts(point)[0], *parts(point)))
    return min(found, key=lambda result: result[0])


def _minimised(
    loss: Callable[[Values], tuple[float, Values]],
    start: Values,
    bounds: Sequence[tuple[float, float | None]] | None = None,
) -> Values:
    if not len(start):
        return start
    from scipy.optimize import minimize

    options = {"maxiter": 1000, "maxfun": 2000, "ftol": 1e-12, "gtol": 1e-8, "maxcor": 20}
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return np.asarray(found.x, dtype=np.float64)


def _whole(c: Values) -> Toeplitz:
    return Toeplitz(tuple(round(float(value) * UNIT) for value in c[1:]))


def _product(one: Values, other: Values) -> Values:
    """Return the power series one · other, as many terms as they have."""
    size = 2 * len(one)
    return np.fft.irfft(np.fft.rfft(one, size) * np.fft.rfft(other, size), size)[: len(one)]


def _correlated(one: Values, other: Values) -> Values:
    """Return Σ_t one[t] other[t - m] for each m."""
    return _product(one[::-1], other)[::-1]
