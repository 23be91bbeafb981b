"""Audit of a mechanism or a sampler that is not FedBlur's own. In: the part, as a run uses it. Out: named checks.

Such a part states its own event, and ε is computed from that. So before a run starts, the part makes one release (or
draws a cohort) many times, among invented clients, and the results are compared with the law that its event stands for:

    mechanism   its event is one of FedBlur's; the noise has at least the variance that the event claims, in every
                release, at every coordinate and at the model's full width; it is drawn afresh, has mean zero and the
                event's shape, is the same for every size of cohort, and comes from the stream that it was given; what
                is released is the sum, and one client moves it by at most S
    sampler     its event is one of FedBlur's; a cohort names each client at most once; clients take part as often as
                the event says, apart from each other, and in each round anew; the denominator is a constant

What a check like this can find are mistakes. It cannot find code that behaves otherwise while it is watched, noise of
too few random bits, or what floating point gives away (docs/exact-noise.md). All random checks of one audit together
fire on an honest part with a probability of 10⁻⁶ at most.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import chi2, f, kstest, norm
from torch import Tensor

from fedblur.core.errors import PrivacyError
from fedblur.core.rng import Rng, Seeded
from fedblur.privacy import events
from fedblur.privacy.clipping import clip_l2
from fedblur.privacy.events import Event
from fedblur.privacy.laws import Check, CohortLog, NoiseLog, Observation, chance, holds
from fedblur.privacy.mechanisms.base import Conditions, Mechanism, MechanismPart, Release
from fedblur.privacy.sampling import FixedSizeSampler, FullSampler, PoissonSampler, Sampler, each_once

_RELEASES = 160  # of the small width
_WIDTH = 256  # coordinates, at most
_FULL = 2**22  # a model's full width is tested up to this
_COHORT = 1000  # clients who send, at most
_SHORT = 1 - 2.0**-20  # of S: what the clip leaves as it is
_ROUNDING = 1e-3  # of S, for sums in float32 and messages that were rounded onto a grid
_DRAWS, _FEWEST, _MOST = 4 * 10**6, 10, 1000  # a sampler's numbers in all, and its cohorts
_DISCRETE = (events.DistributedDiscreteGaussian, events.Skellam)


def audit_mechanism(part: MechanismPart, conditions: Conditions, noise_multiplier: float, rng: Rng) -> list[Check]:
    """Release many times what is known, and test what was added to it. Noise of 0 is claimed by nobody: no checks."""
    if not noise_multiplier:
        return []
    try:
        return _Trial(part, conditions, noise_multiplier).checks(rng)
    except Exception as error:  # whatever a user's own code may raise
        return [_broke_off(error)]


def audit_sampler(sampler: Sampler, shows_cohort: bool, rng: Rng) -> list[Check]:
    """Draw cohorts, and test them against the law that the sampler's event stands for."""
    try:
        return _sampler_checks(sampler, shows_cohort, rng)
    except Exception as error:  # whatever a user's own code may raise
        return [_broke_off(error)]


def _broke_off(error: Exception) -> Check:
    said = (str(error).splitlines() or [""])[0]
    return holds("the audit itself", False, f"it broke off: {type(error).__name__}: {said}")


def claimed_deviation(event: Event) -> float | None:
    """Return the noise on a coordinate that an event claims, in units of S; None for an event that is not FedBlur's."""
    if type(event) is events.Gaussian:
        return event.noise_multiplier
    if type(event) in _DISCRETE:
        assert isinstance(event, _DISCRETE)
        return event.noise_std / event.sensitivity
    return None


class _Trial:
    """A mechanism among invented clients: in each release some of them, or none, send one known direction."""

    def __init__(self, part: MechanismPart, conditions: Conditions, noise_multiplier: float) -> None:
        self.part, self.full, self.sigma = part, conditions, noise_multiplier
        self.small = replace(conditions, dimension=min(conditions.dimension, _WIDTH))
        self.senders = min(max(1, round(conditions.expected_cohort)), _COHORT)

    def checks(self, rng: Rng) -> list[Check]:
        mechanism = self.part.bind(self.small)
        event = mechanism.event(self.sigma)
        deviation, full = claimed_deviation(event), claimed_deviation(self.part.bind(self.full).event(self.sigma))
        known = deviation is not None and full is not None and deviation > 0 and full > 0
        first = holds("its event is FedBlur's", known, f"it accounts for {type(event).__name__}")
        if not known:
            return [first]
        assert deviation is not None
        assert full is not None
        gaussian = type(event) is events.Gaussian
        return [
            first,
            *self._moves(mechanism),
            *self._noise(mechanism, deviation, gaussian, rng),
            *self._wide(full, rng),
        ]

    def _release(self, mechanism: Mechanism, release: Release, rows: Tensor, rng: Rng) -> Tensor:
        """Return what is released, as a round does it. The part gets tensors of its own."""
        noise = mechanism.draw(release, rng)
        blocks = [clip_l2(rows.clone(), release.clip_norm)[0]] if len(rows) else []
        return mechanism.release(mechanism.accumulate(blocks, release, rng), release, noise()).detach().clone()

    def _of(self, width: int, clients: int, number: int) -> Release:
        return Release(width, self.full.clip_norm, self.sigma, clients, torch.device("cpu"), number)

    def _moves(self, mechanism: Mechanism) -> list[Check]:
        """Test, without chance: the same noise twice, with and without one client, shows how far a client moves it."""
        width, bound = self.small.dimension, self.full.clip_norm
        lot = np.random.default_rng(0)
        some = self._rows(lot, min(8, self.senders))
        release = self._of(width, len(some) + 1, 1)

        def at(rows: Tensor) -> Tensor:
            return self._release(mechanism, release, rows, Seeded.root(0)).double()

        try:
            plain = at(some)
        except PrivacyError:  # noise comes in shares, one with each message: no two cohorts have the same
            return []
        drawn = "noise is drawn from the run's stream"
        if not torch.equal(plain, at(some)):
            return [holds(drawn, False, "the same stream gives other noise: nobody knows that it is secret")]
        if torch.equal(plain, self._release(mechanism, release, some, Seeded.root(1)).double()):
            exact = clip_l2(some, bound)[0].value.double().sum(0)
            none = bool((plain - exact).abs().max() <= _ROUNDING * bound)
            said = "there is none, the sum itself is released" if none else "another stream gives the same noise"
            return [holds(drawn, False, said)]
        axis = torch.zeros(1, width)
        axis[0, 0] = bound * _SHORT
        steps = [at(torch.cat([some, row])) - plain for row in (axis, -axis, *self._rows(lot, 4)[:, None])]
        longest = max(float(torch.linalg.vector_norm(step)) for step in steps) / bound
        still = float(torch.linalg.vector_norm(at(torch.cat([some, torch.zeros(1, width)])) - plain)) / bound
        alone = f"one client moves the release by {longest:.6g} S, a client of zeros by {still:.2g} S"
        return [
            holds(drawn, True, "the same stream gives the same noise, another one other noise"),
            holds("a client moves it by at most S", longest <= 1 + _ROUNDING and still <= _ROUNDING, alone),
        ]

    def _rows(self, lot: np.random.Generator, count: int) -> Tensor:
        """Return messages of length S in random directions, [count, width] float32."""
        rows = torch.from_numpy(lot.standard_normal((count, self.small.dimension)))
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        messages: Tensor = rows / lengths * self.full.clip_norm * _SHORT
        return messages.float()

    def _noise(self, mechanism: Mechanism, deviation: float, gaussian: bool, rng: Rng) -> list[Check]:
        """Test releases of known sums against the law of the event."""
        width, lot, stream = self.small.dimension, np.random.default_rng(1), rng.child("mechanism")
        log = NoiseLog(mechanism, spread=1.0)
        found, directions, sent = [], [], []
        for number in range(1, _RELEASES + 1):
            clients = self.senders if number % 2 else 0
            row = self._rows(lot, 1)
            release = self._of(width, max(clients, 1), number)
            heard = self._release(mechanism, release, row.expand(clients, width), stream.child(number))
            if heard.shape != (width,) or not bool(torch.isfinite(heard).all()):
                return [holds("what is released", False, f"it is not {width} finite numbers")]
            seen = Observation(replace(release, noise_multiplier=deviation), heard, clients * row[0].double())
            log.add(seen)
            found.append(seen.residual)
            directions.append(torch.nn.functional.normalize(row[0].double(), dim=0))
            sent.append(clients > 0)
        noise, busy = torch.stack(found), np.array(sent)  # [releases, width]
        along = float((noise * torch.stack(directions)).sum(1)[torch.from_numpy(busy)].sum()) / math.sqrt(busy.sum())
        mean = float(noise.mean(0).abs().max()) * math.sqrt(len(noise))
        power = noise.square().sum(0)  # of each coordinate
        checks = [
            *log.checks()[:4],
            chance("noise at every coordinate", 4 * width * float(chi2.cdf(float(power.min()), len(noise))),
                   f"the quietest has {float(power.min()) / len(noise):.3f} of the variance that is claimed"),
            chance("noise has mean zero", 8 * width * float(norm.sf(mean / self._spread(noise))),
                   f"the strongest of {width} coordinates is off by {mean:.1f} σ"),
            chance("what is released is the sum", 8 * float(norm.sf(abs(along) / self._spread(noise))),
                   f"the sum of {self.senders} clients is off by {abs(along):.1f} σ"),
        ]  # fmt: skip
        if not gaussian:  # messages that are rounded onto a grid at random add to it
            return checks
        if not mechanism.shows_cohort:
            checks.append(self._same_for_all(noise.numpy(), busy))
        return [*checks, self._shape(noise.numpy(), busy)]

    @staticmethod
    def _spread(noise: Tensor) -> float:
        """Return the noise's deviation over what is claimed, at least 1: more noise than claimed is no mistake."""
        return max(1.0, float(noise.square().mean().sqrt()))

    @staticmethod
    def _same_for_all(noise: np.ndarray, busy: np.ndarray) -> Check:
        """Test, two-sided, that noise does not tell how many came: it may not, unless the mechanism says so."""
        ratio = float(np.square(noise[busy]).mean() / max(np.square(noise[~busy]).mean(), 1e-300))
        tails = f.sf(ratio, noise[busy].size, noise[~busy].size), f.cdf(ratio, noise[busy].size, noise[~busy].size)
        words = f"with clients its variance is {ratio:.3g} of that without; shows_cohort says that they are the same"
        return chance("noise is the same for every cohort", 8 * float(min(tails)), words)

    @staticmethod
    def _shape(noise: np.ndarray, busy: np.ndarray) -> Check:
        """Test that noise which is said to be Gaussian is; its variance is tested apart."""
        worst = 1.0
        for group in (noise[busy], noise[~busy]):
            worst = min(worst, float(kstest(group.ravel() / max(group.std(), 1e-300), "norm").pvalue))
        return chance("noise is Gaussian", 8 * worst, f"against a normal law: p = {worst:.2g}")

    def _wide(self, deviation: float, rng: Rng) -> list[Check]:
        """Test two releases at the model's full width."""
        width, name = self.full.dimension, "noise at the model's full width"
        if width <= self.small.dimension:
            return []
        if width > _FULL:
            return [Check(name, None, f"{width:,} coordinates take too long")]
        mechanism = self.part.bind(self.full)
        powers = []
        for number in (1, 2):
            release = self._of(width, 1, number)
            heard = self._release(mechanism, release, torch.zeros(1, width), rng.child("wide", number)).double()
            powers += [
                (float((part / (deviation * self.full.clip_norm)).square().sum()), len(part))
                for part in heard.chunk(16)
            ]
        p_value = len(powers) * min(float(chi2.cdf(power, count)) for power, count in powers)
        least = min(power / count for power, count in powers)
        return [chance(name, 4 * p_value, f"the quietest sixteenth has {least:.4f} of the variance that is claimed")]


def _sampler_checks(sampler: Sampler, shows_cohort: bool, rng: Rng) -> list[Check]:
    inner = events.Gaussian(1.0)
    event, clients, expected = sampler.event(inner), sampler.clients, sampler.expected_cohort
    law = _law_of(event, inner, clients)
    checks = [holds("its event is FedBlur's", law is not None, f"it accounts for {type(event).__name__}")]
    if law is None:
        return checks
    if isinstance(law, PoissonSampler) and shows_cohort and law.rate < 1:
        words = "how many came can be seen, and it claims that sampling amplifies: seen() must return one that does not"
        checks.append(holds("a cohort that is seen", False, words))
    rounds = min(max(_DRAWS // clients, _FEWEST), _MOST)
    log, named, constant = CohortLog(law), True, 0 < expected < math.inf
    stream = rng.child("sampler")
    for round_ in range(1, rounds + 1):
        ids = sampler.cohort(stream.child(round_))
        named = named and is_cohort(ids, clients)
        constant = constant and sampler.expected_cohort == expected
        if not named:
            break
        log.add(ids)
    again, other = (sampler.cohort(Seeded.root(0).child(name)) for name in ("one", "one"))
    checks += [
        holds("a cohort names each client once", named, f"rising numbers below {clients:,}, int64"),
        holds("the denominator is a constant", constant, f"expected_cohort = {expected:g}"),
        holds("cohorts are drawn from the run's stream", torch.equal(again, other), "the same stream, the same cohort"),
    ]
    return [*checks, *(log.checks() if named and not isinstance(law, FullSampler) else [])]


def _law_of(event: Event, inner: Event, clients: int) -> Sampler | None:
    """Return the sampler of FedBlur's whose law an event stands for; everyone where no amplification is claimed."""
    if event == inner:
        return FullSampler(clients)
    if type(event) is events.PoissonSampled and event.inner == inner:
        return PoissonSampler(clients, event.rate)
    if type(event) is events.FixedSizeSampled and event.inner == inner and event.population == clients:
        return FixedSizeSampler(clients, event.cohort)
    return None


def is_cohort(ids: Tensor, clients: int) -> bool:
    """Return whether these are rising client numbers: a client that is named twice would be summed twice."""
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.ndim != 1:
        return False
    return len(ids) == 0 or (int(ids[0]) >= 0 and int(ids[-1]) < clients and each_once(ids))
