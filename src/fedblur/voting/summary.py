"""Stage 7, report. What a finished election says about itself; the same keys as a run of rounds, so tables mix them."""

from __future__ import annotations

from typing import Any

from fedblur.accounting import adjacency
from fedblur.summary import NOISELESS, SEEDED, versions
from fedblur.voting.setup import Election

TRUST = "an ideal secure sum of clients' votes, each with its share of the noise (simulated); only labels leave it"


def summarise(
    election: Election, rows: list[dict[str, Any]], steps: int, figures: dict[str, Any], accuracy: float, loss: float
) -> dict[str, Any]:
    """summary.json: the student at its last step, never the best one."""
    config, wanted = election.config, election.settings.student_steps
    measured = [row["accuracy"] for row in rows]
    return {
        "status": "complete" if steps == wanted else f"stopped after {steps} of {wanted} steps of the student",
        "rounds": 1,  # of communication: everyone votes once
        "accuracy": accuracy,
        "loss": loss,
        "accuracy_last_10_evaluations": sum(measured[-10:]) / len(measured[-10:]) if measured else None,
        "evaluated_on": config.evaluate,
        "data": election.federation.name,
        "data_note": "; ".join(filter(None, (election.federation.note, pool_note(election)))),
        "clients": len(election.pool.voters),
        "parameters": election.layout.total,
        "privacy": privacy_statement(election),
        "local_only": figures,
        "seconds": round(figures["voting_seconds"] + sum(row["seconds"] for row in rows), 2),
        "versions": versions(),
    }


def pool_note(election: Election) -> str:
    """The assumption that the other methods do not make: every table says it."""
    pool = election.pool
    return (
        f"{election.settings.title} needs a public unlabelled pool of {len(pool)} samples that the other methods do "
        f"not have (from {pool.reserved} reserved clients; {len(pool.voters)} vote)"
    )


def privacy_statement(election: Election) -> dict[str, Any]:
    """Invariant 10: every result states all of this."""
    config, plan, event = election.config, election.plan, election.event
    return {
        "warning": warning(election),
        "epsilon": election.ledger.epsilon(),
        "delta": plan.delta,
        "accountant": config.accountant,
        "unit": "client (all samples of one user)",
        "adjacency": adjacency(plan.event()),
        "sampling": f"none: all {plan.sampler.clients:,} clients vote on every query",
        "mechanism": f"{election.settings.title}: noisy plurality of votes, each of l2 norm at most 1 per query",
        "noise_multiplier": plan.noise_multiplier,
        "queries": event.queries,
        "vote_noise_std": event.noise_std,
        "checks": event.checks,
        "check_noise_std": event.check_noise_std,
        "clip_norm": None,
        "expected_cohort": plan.expected_cohort,
        "releases": len(election.ledger.spends()),
        "ledger": election.ledger.anchor(),
        "trust_model": TRUST,
        "tuning": f"settings chosen before this run are not accounted; accuracy was measured on {config.evaluate} data",
        "signal_to_noise": None,
    }


def warning(election: Election) -> str | None:
    """Why this run protects nobody, where that is so."""
    if election.plan.noise_multiplier == 0:
        return NOISELESS
    return None if election.rng.private else SEEDED
