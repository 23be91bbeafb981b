"""A node does what it was enrolled for: it refuses less noise, a larger clip norm and more rounds, and names the limit.

The real apps, in one process. The server's questions are changed on their way to the nodes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from flwr.common.logger import FLOWER_LOGGER

from fedblur.flower import wire
from fedblur.training.loop import Run
from tests.flower.world import SECURE, LoopGrid, deployment, federated

Head = Any  # a question's values, as Flower keeps them
TRUST = {"central": ("update", {}), "secure-sum": ("masked", {"mechanism": SECURE})}
both = pytest.mark.parametrize("trust", list(TRUST))


@pytest.fixture(autouse=True)
def log() -> Iterator[list[str]]:
    """What nodes and server write down."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    before, FLOWER_LOGGER.handlers = FLOWER_LOGGER.handlers, [handler]
    yield lines
    FLOWER_LOGGER.handlers = before


def meddled(tmp_path: Path, trust: str, meddle: Callable[[Head, Any], None], **changes: Any) -> tuple[Run, LoopGrid]:
    """A run whose questions to train were changed by `meddle(head, context)`."""
    kind, more = TRUST[trust]
    task = deployment(tmp_path, 3, **{"noise_multiplier": None, "epsilon": 4.0} | more | changes)
    grid = LoopGrid(task, 3, trust)
    answer = grid.app._registered_funcs[f"train.{kind}"]

    def asked(message: Message, context: Any) -> Message:
        meddle(message.content[wire.HEAD], context)
        return answer(message, context)

    grid.app._registered_funcs[f"train.{kind}"] = asked
    return federated(task, grid, tmp_path / "run", trust, deadline=0.2), grid


def scaled(key: str, factor: float) -> Callable[[Head, Any], None]:
    def meddle(head: Head, context: Any) -> None:
        head[key] = factor * head[key]

    return meddle


def answered(grid: LoopGrid) -> bool:
    return any(reply.content.array_records.get(wire.ARRAYS) for reply in grid.received)


@both
def test_node__trains_with_the_noise_of_its_plan_or_more(trust: str, tmp_path: Path, log: list[str]) -> None:
    for name, factor in (("plan", 1.0), ("more", 1.5)):
        (tmp_path / name).mkdir()
        _, grid = meddled(tmp_path / name, trust, scaled("noise_multiplier", factor))
        assert answered(grid)
    assert [line for line in log if "noise_multiplier=" in line] == []


@both
@pytest.mark.parametrize("factor", [0.5, 0.999])
def test_node__refuses_less_noise_than_its_epsilon_needs(
    trust: str, factor: float, tmp_path: Path, log: list[str]
) -> None:
    run, grid = meddled(tmp_path, trust, scaled("noise_multiplier", factor))
    assert not answered(grid)
    planned = run.summary["privacy"]["noise_multiplier"]
    (reason,) = {line.partition(": ")[2] for line in log if "noise_multiplier=" in line}
    assert reason == (
        f"noise_multiplier={factor * planned} is below {planned:.6g}, which epsilon=4.0 needs for the 3 planned rounds"
    )


@both
@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf])
def test_node__refuses_what_is_no_noise_at_all(trust: str, sigma: float, tmp_path: Path, log: list[str]) -> None:
    def meddle(head: Head, context: Any) -> None:
        head["noise_multiplier"] = sigma

    _, grid = meddled(tmp_path, trust, meddle)
    assert not answered(grid)
    assert any(f"noise_multiplier={sigma} cannot give epsilon=4.0" in line for line in log)


@both
def test_node__refuses_another_noise_multiplier_than_its_own(trust: str, tmp_path: Path, log: list[str]) -> None:
    meddle = scaled("noise_multiplier", 0.99)
    _, grid = meddled(tmp_path, trust, meddle, noise_multiplier=0.5, epsilon=None)
    assert not answered(grid)
    assert any("noise_multiplier=0.495 is not the configuration's 0.5" in line for line in log)


@both
def test_node__refuses_a_larger_clip_norm(trust: str, tmp_path: Path, log: list[str]) -> None:
    _, grid = meddled(tmp_path, trust, scaled("clip_norm", 1.01))
    assert not answered(grid)
    assert any("clip_norm=0.505 is not the configuration's 0.5" in line for line in log)


@both
def test_node__refuses_a_clip_norm_beyond_what_adapting_can_reach(trust: str, tmp_path: Path, log: list[str]) -> None:
    settings = {"clipping": {"name": "adaptive", "bit_noise": 100.0}}
    (tmp_path / "honest").mkdir()
    _, grid = meddled(tmp_path / "honest", trust, scaled("clip_norm", 1.0), **settings)
    assert answered(grid)
    assert [line for line in log if "clip_norm=" in line] == []

    def meddle(head: Head, context: Any) -> None:
        head["clip_norm"] = 500_001.0

    _, grid = meddled(tmp_path, trust, meddle, **settings)
    assert not answered(grid)
    assert any("is beyond 500000.0, as far as it adapts" in line for line in log)


@both
def test_node__refuses_rounds_beyond_its_plan(trust: str, tmp_path: Path, log: list[str]) -> None:
    """The server's configuration has two rounds more than the nodes'; its noise is enough for all of them."""
    tasks = []
    for name, rounds in (("nodes", 3), ("server", 5)):
        (tmp_path / name).mkdir()
        changes = {"noise_multiplier": None, "epsilon": 4.0, "rounds": rounds} | TRUST[trust][1]
        tasks.append(deployment(tmp_path / name, 3, **changes))
    nodes, server = tasks
    run = federated(server, LoopGrid(nodes, 3, trust), tmp_path / "run", trust, deadline=0.2)
    kind = TRUST[trust][0]
    reasons = [line for line in log if line.startswith(f"{kind} of round")]
    assert reasons == [
        f"{kind} of round {round_}: round {round_} is beyond the 3 that were planned"
        for round_ in (4, 5)
        for _ in range(3)
    ]
    assert len(run.rounds) == 5
