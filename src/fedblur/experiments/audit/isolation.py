"""Checks that no client touches another's message. In: a configuration and a machine. Out: named exact checks.

Epsilon rests on this: adding a client moves the sum by its own message and by nothing else. So every other client's
message must be the same, bit for bit, with and without the target, whatever the others' data are. The others are
chosen by an adversary, on the configuration's model, methods, message and local training, in the engine and with the
precision that the machine gives it:

    few        clients with one sample each, and a target with far more than all of them
    mixed      clients of all sizes, and a target with one sample
    between    clients of two sizes, and a target between them: it is in the middle of the order
    copies     copies of the client whom the target's presence moves most, one by one: errors add up

Bits are compared in seeded streams: a client's shuffles follow from its id, so both sides draw the same.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedblur.core.config import Config
from fedblur.core.errors import ConfigError
from fedblur.core.rng import Seeded
from fedblur.data.population import Federation, Packed, Samples, each_input, made_up
from fedblur.engines import suitable_threads
from fedblur.privacy.laws import Check, holds
from fedblur.privacy.mechanisms.base import Release
from fedblur.privacy.mechanisms.gaussian import FixedPoint, Gaussian
from fedblur.training.machine import Machine
from fedblur.training.round import client_job
from fedblur.training.setup import Setup, load, prepare

_OTHERS = 24  # other clients
_HEAVY = 200  # samples of a target that has far more than all others
_ALONE = 12  # clients who are tried one by one


@dataclass(frozen=True)
class Crowd:
    """A population whose last client is the target."""

    name: str
    population: Packed


def check_isolation(config: Config, machine: Machine | None = None) -> tuple[Check, ...]:
    """Compare every other client's message with and without the target, and what the target adds to the sum."""
    if config.voting is not None:
        raise ConfigError(f"method {config.voting.part_name!r} sends votes, not updates; check a method of rounds")
    machine = machine or Machine(device="cpu")
    crowds = list(_crowds(config, load(config, machine)))
    with tempfile.TemporaryDirectory() as folder:
        setups = {crowd.name: _prepared(config, crowd, machine, Path(folder)) for crowd in crowds}
        copies = _copies(setups[crowds[0].name], crowds[0])
        setups[copies.name] = _prepared(config, copies, machine, Path(folder))
        differences = [(*difference(setup), name) for name, setup in setups.items()]
        sums = [(moves, name) for name, setup in setups.items() if (moves := sensitivity(setup)) is not None]
    words = "the same bits with and without a target of any size"
    moved, changed, name = max(differences)
    if changed:
        words = (
            f"{changed} other clients send another message when the target is there ({name}); "
            f"together they move the sum by {moved:.3g} S"
        )
    others = holds("others' messages", not any(changed for _, changed, _ in differences), words)
    total = "sensitivity of the sum"
    if not sums:
        return others, Check(total, None, "rounding at random differs between two sums of this mechanism")
    most, name = max(sums)
    return others, holds(total, most <= 1, f"the target moves it by {most:.9f} of the bound at most ({name})")


def difference(setup: Setup) -> tuple[float, int]:
    """Return how far the target moves the others' sum, in units of the bound, and how many messages it changes.

    Compares the rows of everyone with the rows of everyone but the last client: one of them may be new, no more.
    """
    clients = setup.federation.train.clients
    everyone, others = _rows(setup, torch.arange(clients)), _rows(setup, torch.arange(clients - 1))
    with_target, without = (Counter(row.numpy().tobytes() for row in rows) for rows in (everyone, others))
    new, gone = (with_target - without).total(), (without - with_target).total()
    if not gone and new == 1:
        return 0.0, 0
    own = _rows(setup, torch.tensor([clients - 1]))
    job = client_job(setup.protocol, setup.protocol.server.init(setup.initial))
    moved = (everyone.double().sum(0) - others.double().sum(0) - own.double().sum(0)).norm()
    return float(moved) / job.message.l2_bound(job.clip_norm), max(gone, 1)


def sensitivity(setup: Setup) -> float | None:
    """Return how far the target moves the sum of whole numbers, in units of the bound, rounded up."""
    protocol, clients = setup.protocol, setup.federation.train.clients
    if not isinstance(protocol.mechanism, Gaussian):
        return None
    job = client_job(protocol, protocol.server.init(setup.initial))
    width, bound = job.message.width(protocol.layout.total), job.message.l2_bound(job.clip_norm)
    release = Release(width, bound, protocol.plan.noise_multiplier, clients, setup.initial.device)
    totals = []
    for count in (clients, clients - 1):
        blocks = setup.engine.map_clients(job, torch.arange(count), Seeded.root(0))
        totals.append(protocol.mechanism.accumulate((block.bounded for block in blocks), release, Seeded.root(0)))
    moved = (totals[0] - totals[1]).double().norm() * FixedPoint.of(release).step  # below 2^41 steps, so to 2^-52
    return float(moved) / bound


def _rows(setup: Setup, ids: Tensor) -> Tensor:
    """Return the messages of these clients, in any order, on the CPU."""
    protocol = setup.protocol
    job = client_job(protocol, protocol.server.init(setup.initial))
    with suitable_threads(setup.initial.device, protocol.layout.total):
        blocks = [block.bounded.value.cpu() for block in setup.engine.map_clients(job, ids, Seeded.root(0))]
    return torch.cat(blocks)


def _crowds(config: Config, like: Federation) -> Iterator[Crowd]:
    batch = config.local.batch_size
    yield Crowd(f"one-sample clients, a target of {_HEAVY}", _packed(like, [1] * _OTHERS + [_HEAVY]))
    mixed = [1 + (7 * i) % (2 * batch) for i in range(_OTHERS)]
    yield Crowd("clients of all sizes, a target of one", _packed(like, [*mixed, 1]))
    between = [2] * (_OTHERS // 2) + [batch + 1] * (_OTHERS // 2)
    yield Crowd("clients of two sizes, a target between", _packed(like, [*between, max(3, batch // 2)]))


def _packed(like: Federation, sizes: list[int]) -> Packed:
    """Draw random samples of the kind that the data set has."""
    lots, total, classes = torch.Generator().manual_seed(0), sum(sizes), like.train.classes
    samples, counts = made_up(like.test, total, classes, lots), torch.tensor(sizes)
    return Packed(samples.x, samples.y, torch.cumsum(counts, 0) - counts, counts, classes)


def _copies(setup: Setup, crowd: Crowd) -> Crowd:
    """Make everyone but the target a copy of the client whom the target changes most; if none, of the first."""
    people, target = crowd.population, torch.tensor([crowd.population.clients - 1])
    moves = []
    for client in range(min(_ALONE, people.clients - 1)):
        alone = _rows(setup, torch.tensor([client]))[0]
        pair = _rows(setup, torch.cat([torch.tensor([client]), target]))
        moves.append(float((pair - alone).double().norm(dim=1).min()))  # the row that is closer is this client's
    worst = max(range(len(moves)), key=moves.__getitem__)
    starts, sizes = people.starts.clone(), people.sizes.clone()
    starts[:-1], sizes[:-1] = people.starts[worst], people.sizes[worst]
    return Crowd(f"copies of one client, a target of {_HEAVY}", replace(people, starts=starts, sizes=sizes))


def _prepared(config: Config, crowd: Crowd, machine: Machine, folder: Path) -> Setup:
    """Set up the configuration on this crowd. All that decides a message stays; the noise does not matter."""
    clipping = config.clipping and replace(config.clipping, bit_noise=10.0)
    plain = replace(
        config, population=None, clients=None, evaluate="test", sampling="full", sample_rate=1.0, clipping=clipping,
        epsilon=None, noise_multiplier=1.0, delta=1e-3, accountant="rdp", seed=0,
    )  # fmt: skip
    people = crowd.population
    own = Federation(
        "a crowd", people, None, 0, Samples(each_input(people.x, lambda x: x[:10]), people.y[:10]), public=True
    )
    return prepare(plain, folder / f"{crowd.name}.jsonl", machine, own)
