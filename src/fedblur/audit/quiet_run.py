"""A run of a configuration among clients who send zeros: all that is released is noise, and its sum is known.

`laws.py` tests what it shows of the noise, the cohorts and the length of messages.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fedblur.audit.laws import Check, CohortLog, NoiseLog, messages_fit
from fedblur.audit.listening import Attended, Overheard, first_state
from fedblur.audit.tiny_world import CLASSES, COHORT, FEATURES, Tiny, clients_for, endless, prepared
from fedblur.config import Config
from fedblur.data.population import Packed
from fedblur.engines import suitable_threads
from fedblur.round import run_round
from fedblur.setup import Machine

_BLOCKS, _ROUNDS = 16, 400
_SMALL_COHORT = 10  # where everyone comes, or each client draws noise for every coordinate, which takes long


def quiet_checks(config: Config, sigma: float, longest: float, folder: Path, machine: Machine) -> tuple[Check, ...]:
    """What such a run shows, with this noise. `longest`: message of another run, in units of what noise is made for."""
    shares = getattr(config.mechanism, "mode", "fast") == "exact"
    small = (shares or config.sample_rate == 1) and config.clipping is None  # whose bit needs a large cohort
    cohort = _SMALL_COHORT if small else COHORT
    clients = clients_for(config, cohort, cohort)
    config = replace(config, rounds=_ROUNDS, epsilon=None, noise_multiplier=sigma, local=replace(config.local, steps=1))
    zeros = torch.zeros(clients, dtype=torch.int64)
    population = Packed(torch.zeros(1, _BLOCKS * FEATURES), zeros[:1], zeros, zeros + 1, CLASSES)
    setup = prepared(config, folder, machine, Tiny(_BLOCKS), population)
    mechanism = Overheard(setup.protocol.mechanism, inside=True)
    engine, plan = Attended(setup.protocol.engine), setup.protocol.plan
    protocol = replace(setup.protocol, mechanism=mechanism, engine=engine, ledger=endless(folder / "quiet.jsonl", plan))
    state = first_state(protocol, setup.initial)
    noise, cohorts = NoiseLog(mechanism.inner), CohortLog(plan.sampler)
    with suitable_threads(setup.initial.device, protocol.layout.total):
        for round_ in range(1, _ROUNDS + 1):
            state = run_round(protocol, state, setup.rng.child("round", round_)).state
            cohorts.add(engine.last)
            if mechanism.seen is not None:
                noise.add(mechanism.seen)
    return (messages_fit(max(longest, mechanism.longest)), *noise.checks(), *cohorts.checks())
