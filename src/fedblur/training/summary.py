"""Stage 8, report: the summary of a run of rounds, with the claim that it makes. In: its end. Out: a RunSummary."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import replace

import torch

from fedblur.core.callbacks import Row, figures_of
from fedblur.core.config import Config, canonical
from fedblur.core.plugins import loaded
from fedblur.core.registry import describe
from fedblur.core.version import version
from fedblur.learning.evaluation import Measured
from fedblur.learning.metrics import metrics_of
from fedblur.privacy.claim import Claim, unclaimed, why_not_private
from fedblur.privacy.planning import signal_to_noise
from fedblur.training.round import Protocol
from fedblur.training.run_folder import RunSummary
from fedblur.training.server import ServerState
from fedblur.training.setup import Setup


def summarise(setup: Setup, state: ServerState, round_: int, rows: list[Row], measured: Measured) -> RunSummary:
    """Return the summary of a run that ended at this state, with the model of this round."""
    config, protocol = setup.config, setup.protocol
    clipped = [share for row in rows if (share := row.get("local_only", {}).get("clipped_share")) is not None]
    done, plain = round_ == config.rounds, list(measured.figures) == ["accuracy"]
    return RunSummary(
        status="complete" if done else f"stopped after {round_} of {config.rounds} rounds",
        rounds=round_,
        accuracy=measured.figures.get("accuracy"),
        loss=measured.loss,
        accuracy_last_10_evaluations=mean_of_last_10(rows),
        task=None if protocol.task.classes else protocol.task.part_name,
        metric=None if plain else next(iter(measured.figures)),
        figures=None if plain else measured.figures,
        figures_last_10_evaluations=means_of_last_10(rows) if any("figures" in row for row in rows) else None,
        evaluated_on=evaluated_on(config),
        data=setup.federation.name,
        data_note=setup.federation.note,
        clients=setup.federation.train.clients,
        parameters=protocol.layout.total,
        sent_coordinates=protocol.mask.kept(protocol.layout.total) if protocol.mask else protocol.layout.total,
        privacy=claim(setup, state),
        local_only={"clipped_share": sum(clipped) / len(clipped) if clipped else None},
        seconds=round(sum(row.get("seconds") or 0.0 for row in rows), 2),
        machine=setup.source.machine,
        versions=versions(),
    )


def claim(setup: Setup, state: ServerState) -> Claim:
    """Return what a run of rounds claims (invariant 10)."""
    config, protocol, plan = setup.config, setup.protocol, setup.protocol.plan
    vector_plan = plan  # with the noise on the update: a little more where a noisy bit count rides along
    clip_norm = protocol.clip_norm
    if protocol.clipping is not None:
        sigma = protocol.clipping.vector_multiplier(plan.noise_multiplier, plan.expected_cohort)
        vector_plan = replace(plan, noise_multiplier=sigma)
        clip_norm = protocol.clipping.clip_norm(state, clip_norm)
    nothing = unclaimed(setup.own_parts) is not None
    stated = Claim(
        warning=warning(setup),
        own_parts=setup.own_parts or None,
        cautions=tuple(setup.cautions),
        epsilon=math.inf if nothing else protocol.ledger.epsilon(),
        delta=plan.delta,
        accountant=config.accountant,
        adjacency=plan.adjacency,
        sampling=plan.sampler.description,
        mechanism=canonical(describe(config.mechanism)),
        noise_multiplier=plan.noise_multiplier,
        clip_norm=clip_norm,
        clipping=clipping_rule(protocol),
        support="all coordinates" if protocol.mask is None else f"public mask {canonical(describe(protocol.mask))}",
        expected_cohort=plan.expected_cohort,
        releases=len(protocol.ledger.spends()),
        ledger=protocol.ledger.anchor(),
        population=protocol.ledger.population(),
        trust_model=config.mechanism.trust,
        tuning=untuned(config),
        signal_to_noise=signal_to_noise(vector_plan, protocol.layout.total),  # a mask cuts both alike
    )
    return replace(stated, **setup.source.claims)


def warning(setup: Setup) -> str | None:
    """Return why this run protects nobody; None where it protects its clients."""
    sigma, reason = setup.protocol.plan.noise_multiplier, unclaimed(setup.own_parts)
    return why_not_private(setup.rng.private, sigma, setup.config.clip_norm, reason)


def clipping_rule(protocol: Protocol) -> str:
    """Say how updates are bounded, and by what."""
    how = {"clip": "clipped to at most clip_norm", "normalise": "scaled to clip_norm exactly"}[protocol.bounding]
    if protocol.clipping is None:
        return how
    rule = canonical(describe(protocol.clipping))
    return f"{how}, which started at {protocol.clip_norm:g} and adapts within the same releases: {rule}"


def evaluated_on(config: Config) -> str:
    """Say which data the metrics are of, and how often each sample was looked at."""
    looked = (
        config.evaluate if config.test_views == 1 else f"{config.test_views} views of each of the {config.evaluate}"
    )
    return f"{looked} (initial personal parts)" if config.personal else looked


def untuned(config: Config) -> str:
    """Say that nothing is known about how the settings were chosen."""
    headline = metrics_of(config.task, config.metrics)[0].key
    return f"Settings chosen before this run are not accounted; {headline} was measured on {evaluated_on(config)} data"


def mean_of_last_10(rows: Sequence[Row]) -> float | None:
    """Return the mean accuracy of the last ten evaluations; None where there was none."""
    return means_of_last_10(rows).get("accuracy")


def means_of_last_10(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean of each metric over the last ten evaluations; none where there was none."""
    measured = [figures for row in rows if (figures := figures_of(row))][-10:]
    return {name: sum(each[name] for each in measured) / len(measured) for name in (measured[-1] if measured else {})}


def versions() -> dict[str, str]:
    """Return the versions of all that computed a run."""
    own = {f"plugin {name}": digest for name, digest in loaded().items()}
    return {"fedblur": version(), "torch": torch.__version__, "python": platform.python_version(), **own}
