"""What a finished run says about itself: the result, and everything that a claim about its privacy must state."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch

from fedblur.accounting import adjacency
from fedblur.config import canonical
from fedblur.planning import signal_to_noise
from fedblur.registry import describe
from fedblur.server import ServerState
from fedblur.setup import Setup

SEEDED = "NOT PRIVATE: seeded"
NOISELESS = "NOT PRIVATE: no noise"


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
        "evaluated_on": config.evaluate,
        "data": setup.federation.name,
        "data_note": setup.federation.note,
        "clients": setup.federation.train.clients,
        "parameters": setup.protocol.layout.total,
        "privacy": privacy_statement(setup),
        "local_only": {"clipped_share": sum(clipped) / len(clipped) if clipped else None},
        "seconds": round(sum(row["seconds"] for row in rows), 2),
        "versions": {
            "fedblur": version("fedblur"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def privacy_statement(setup: Setup) -> dict[str, Any]:
    """Invariant 10: every result states all of this."""
    config, plan = setup.config, setup.protocol.plan
    spends = len(setup.protocol.ledger.spends())
    return {
        "warning": warning(setup),
        "epsilon": setup.protocol.ledger.epsilon(),
        "delta": plan.delta,
        "accountant": config.accountant,
        "unit": "client (all samples of one user)",
        "adjacency": adjacency(plan.event()),
        "sampling": plan.sampler.description,
        "mechanism": canonical(describe(config.mechanism)),
        "noise_multiplier": plan.noise_multiplier,
        "clip_norm": config.clip_norm,
        "expected_cohort": plan.expected_cohort,
        "releases": spends,
        "trust_model": config.mechanism.trust,
        "tuning": f"settings chosen before this run are not accounted; accuracy was measured on {config.evaluate} data",
        "signal_to_noise": signal_to_noise(plan, setup.protocol.layout.total),
    }


def warning(setup: Setup) -> str | None:
    """Why this run protects nobody, where that is so."""
    if setup.protocol.plan.noise_multiplier == 0:
        return NOISELESS
    return None if setup.rng.private else SEEDED
