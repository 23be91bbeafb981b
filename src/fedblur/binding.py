"""A configuration's mechanism under the conditions of a run: the same on a server and on its clients.

Apart from `setup.py` because clients need it and nothing else of a run: no accountant, no ledger.
"""

from __future__ import annotations

from fedblur.config import Config
from fedblur.mechanisms import Mechanism
from fedblur.mechanisms.base import Conditions
from fedblur.sampling import Sampler


def mechanism_for(config: Config, sampler: Sampler, parameters: int) -> Mechanism:
    """The configuration's mechanism for messages of the width that this run's clients send."""
    width = parameters if config.mask is None else config.mask.kept(parameters)
    width += config.clipping is not None  # the bit of adaptive clipping
    conditions = Conditions(width, config.clip_norm, sampler.expected_cohort, sampler.clients)
    mechanism: Mechanism = config.mechanism.bind(conditions)
    return mechanism
