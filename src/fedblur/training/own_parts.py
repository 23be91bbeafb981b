"""Parts of a run that are not FedBlur's own: which they are, what nobody checked, and what their audit found.

Trusted by construction, whatever the code does with its arguments:

    method, model, task   they compute a client's update from that client's samples, and the clip comes after them
    server, averaging, denoise, clipping, mask    they see noisy sums and public figures, and no client's data
    metric    it sees held-out data, whose figures ε does not cover in any run

Assumed: a data set and a partition decide who owns which sample, so they decide what a client is.

Audited, since ε is computed from the event that they state: a mechanism and a sampler (`privacy/part_audit.py`). Where
the audit fails, the run claims nothing. A voting protocol that runs itself cannot be audited and claims nothing either.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from fedblur.core.config import Config
from fedblur.core.plugins import PLUGIN
from fedblur.core.rng import Rng
from fedblur.learning.tasks import Own
from fedblur.privacy.accounting import PrivacyPlan
from fedblur.privacy.claim import OwnPart
from fedblur.privacy.laws import Check
from fedblur.privacy.mechanisms.base import conditions_for
from fedblur.privacy.part_audit import audit_mechanism, audit_sampler

_CLIENTS = "that it keeps nothing from one client for the next (what it sends is clipped after it)"
_RELEASED = "nothing that ε rests on: it sees noisy sums and public figures alone"
_OWNERS = "that a client is a person with all of their samples, and that N and the model's shape follow from no data"
_WATCHED = "that it does the same when it is not watched"
UNCHECKED = {
    "method": _CLIENTS,
    "model": _CLIENTS,
    "task": _CLIENTS,
    "metric": "nothing that ε rests on: it sees held-out data, whose figures ε does not cover",
    "server": _RELEASED,
    "averaging": _RELEASED,
    "denoise": _RELEASED,
    "clipping": _RELEASED,
    "mask": _RELEASED,
    "dataset": _OWNERS,
    "partition": _OWNERS,
    "mechanism": f"{_WATCHED}, and that floating point gives nothing away",
    "sampling": _WATCHED,
    "voting": "that a client's votes depend on its own data alone",
}
_AUDITED = ("mechanism", "sampling")  # where no audit ran, nothing is claimed


def is_own(part: object) -> bool:
    """Return whether a part's code lies outside of FedBlur."""
    return type(part).__module__.partition(".")[0] != "fedblur"


def own_parts(config: Config, module: nn.Module | None = None) -> tuple[OwnPart, ...]:
    """List the parts of a run that are not FedBlur's. `module`: a model that was given from Python."""
    found = []
    for field in fields(config):
        if "part" not in field.metadata:
            continue
        value = getattr(config, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Own) and part.function:  # a loss from Python
                source, _, name = part.function.partition(":")
                found.append(_part("task", name, source))
                continue
            if part is None or (field.name == "model" and module is not None) or not is_own(part):
                continue
            kind = "voting" if part is config.voting else str(field.metadata["part"])
            if kind in _AUDITED and config.voting is not None:
                continue  # all clients vote, and votes have noise of their own
            audit = "not run" if kind in _AUDITED or (kind == "voting" and _runs_itself(part)) else None
            found.append(_part(kind, part.part_name, type(part).__module__, audit))
    if module is not None and is_own(module):
        found.append(_part("model", type(module).__qualname__, type(module).__module__))
    return tuple(found)


def _part(kind: str, name: str, module: str, audit: Any = None) -> OwnPart:
    if module.startswith(PLUGIN):  # a file that was named: its module has a hash for a name
        module = Path(str(sys.modules[module].__file__)).name
    return OwnPart(kind, name, module, UNCHECKED.get(kind, "all that it does"), audit)


def _runs_itself(voting: object) -> bool:
    """Return whether a voting part replaces FedBlur's count, noise and claim, and not only the votes."""
    home = {name: base.__module__ for base in reversed(type(voting).__mro__) for name in vars(base)}
    return any(not home[name].startswith("fedblur.") for name in ("run", "replan"))


def audited(
    parts: tuple[OwnPart, ...], config: Config, plan: PrivacyPlan, parameters: int, rng: Rng
) -> tuple[OwnPart, ...]:
    """Return the parts with what the audits of mechanism and sampler found."""

    def with_audit(part: OwnPart) -> OwnPart:
        if part.kind == "mechanism":
            conditions = conditions_for(config, plan.sampler, parameters)
            return _judged(part, audit_mechanism(config.mechanism, conditions, plan.noise_multiplier, rng))
        if part.kind == "sampling":
            return _judged(part, audit_sampler(plan.sampler, plan.shows_cohort, rng))
        return part

    return tuple(map(with_audit, parts))


def _judged(part: OwnPart, checks: list[Check]) -> OwnPart:
    broken = [check for check in checks if check.broken]
    if broken:
        return replace(part, audit="failed", findings=f"{broken[0].name}: {broken[0].words}")
    held = sum(check.p_value is not None for check in checks)
    return replace(part, audit="passed", findings=f"{held} checks hold" if checks else "no noise is claimed")
