"""How good the model is that a state of the server publishes: overall, and (simulation only) for whom."""

from __future__ import annotations

from typing import Any

from fedblur.evaluation import evaluate
from fedblur.fairness import fairness
from fedblur.functional import Params
from fedblur.server import ServerState, published
from fedblur.setup import Setup


def measure(setup: Setup, state: ServerState) -> tuple[float, float]:
    """Accuracy and loss on held-out data."""
    config = setup.config
    return evaluate(setup.protocol.forward, _model(setup, state), setup.held_out, config.method, config.test_views)


def measure_fairness(setup: Setup, state: ServerState) -> dict[str, Any]:
    """Accuracy by class and by client: `local_only`. Nothing in a real federation, whose data stay on its nodes."""
    if setup.protocol.processes.engine is not None:
        return {}
    model, config = _model(setup, state), setup.config
    return fairness(setup.protocol.forward, model, setup.federation, setup.held_out, config.method, config.test_views)


def _model(setup: Setup, state: ServerState) -> Params:
    return setup.protocol.layout.unflatten(published(state, setup.config.averaging))
