"""What a finished run says about itself: the result, and everything that a claim about its privacy must state."""

from __future__ import annotations

import math
import platform
from dataclasses import replace
from typing import Any

import torch

from fedblur.accounting import PrivacyPlan
from fedblur.config import Config, canonical
from fedblur.planning import signal_to_noise
from fedblur.plugins import loaded
from fedblur.registry import describe
from fedblur.round import Protocol
from fedblur.server import ServerState
from fedblur.setup import Setup
from fedblur.version import version

SEEDED = "NOT PRIVATE: seeded"
NOISELESS = "NOT PRIVATE: no noise"
UNBOUNDED = "NOT PRIVATE: no noise and no clip norm"


def summarise(
    setup: Setup, state: ServerState, rows: list[dict[str, Any]], accuracy: float, loss: float
) -> dict[str, Any]:
    """summary.json: final round, never the best one."""
    config = setup.config
    measured = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    clipped = [share for row in rows if (share := row["local_only"]["clipped_share"]) is not None]
    return {
        "status": "complete"
        if state.round == config.rounds
        else f"stopped after {state.round} of {config.rounds} rounds",
        "rounds": state.round,
        "accuracy": accuracy,
        "loss": loss,
        "accuracy_last_10_evaluations": sum(measured[-10:]) / len(measured[-10:]) if measured else None,
        "evaluated_on": evaluated_on(config),
        "data": setup.federation.name,
        "data_note": setup.federation.note,
        "clients": setup.federation.train.clients,
        "parameters": setup.protocol.layout.total,
        "sent_coordinates": sent_coordinates(setup.protocol),
        "privacy": privacy_statement(setup, state),
        "local_only": {"clipped_share": sum(clipped) / len(clipped) if clipped else None},
        "seconds": round(sum(row["seconds"] for row in rows), 2),
        "machine": setup.machine,
        "versions": versions(),
    }


def evaluated_on(config: Config) -> str:
    """Which data, and how often each sample was looked at."""
    return config.evaluate if config.test_views == 1 else f"{config.test_views} views of each of the {config.evaluate}"


def versions() -> dict[str, str]:
    """What a run was computed with."""
    own = {f"plugin {name}": digest for name, digest in loaded().items()}
    return {"fedblur": version(), "torch": torch.__version__, "python": platform.python_version(), **own}


def privacy_statement(setup: Setup, state: ServerState) -> dict[str, Any]:
    """Invariant 10: every result states all of this."""
    config, protocol, plan = setup.config, setup.protocol, setup.protocol.plan
    spends = len(setup.protocol.ledger.spends())
    return {
        "warning": warning(setup),
        "cautions": setup.cautions,
        "epsilon": setup.protocol.ledger.epsilon(),
        "delta": plan.delta,
        "accountant": config.accountant,
        "unit": "client (all samples of one user)",
        "adjacency": plan.adjacency,
        "sampling": plan.sampler.description,
        "mechanism": canonical(describe(config.mechanism)),
        "noise_multiplier": plan.noise_multiplier,
        "clip_norm": clip_norm_now(protocol, state),
        "clipping": clipping_statement(protocol),
        "support": "all coordinates" if protocol.mask is None else f"public mask {canonical(describe(protocol.mask))}",
        "expected_cohort": plan.expected_cohort,
        "releases": spends,
        "ledger": setup.protocol.ledger.anchor(),
        "trust_model": config.mechanism.trust,
        "tuning": "Settings chosen before this run are not accounted; "
        f"accuracy was measured on {evaluated_on(config)} data",
        "signal_to_noise": signal_to_noise(vector_plan(protocol), protocol.layout.total),  # a mask cuts both alike
        **protocol.processes.statement(plan),
    }


def clipping_statement(protocol: Protocol) -> str:
    """How updates are bounded, and by what."""
    how = {"clip": "clipped to at most clip_norm", "normalise": "scaled to clip_norm exactly"}[protocol.bounding]
    if protocol.clipping is None:
        return how
    rule = canonical(describe(protocol.clipping))
    return f"{how}, which started at {protocol.clip_norm:g} and adapts within the same releases: {rule}"


def clip_norm_now(protocol: Protocol, state: ServerState) -> float:
    """S, or where adaptive clipping has taken it."""
    adaptive = protocol.clipping
    return protocol.clip_norm if adaptive is None else adaptive.clip_norm(state, protocol.clip_norm)


def sent_coordinates(protocol: Protocol) -> int:
    """k: how many coordinates a round's release has."""
    total = protocol.layout.total
    return total if protocol.mask is None else protocol.mask.kept(total)


def vector_plan(protocol: Protocol) -> PrivacyPlan:
    """The plan with the noise that the model's update gets: a little more where a noisy bit count rides along."""
    plan = protocol.plan
    if protocol.clipping is None:
        return plan
    sigma = protocol.clipping.vector_multiplier(plan.noise_multiplier, plan.expected_cohort)
    return replace(plan, noise_multiplier=sigma)


def warning(setup: Setup) -> str | None:
    """Why this run protects nobody, where that is so."""
    if setup.protocol.plan.noise_multiplier == 0:
        return NOISELESS if math.isfinite(setup.config.clip_norm) else UNBOUNDED
    return None if setup.rng.private else SEEDED
