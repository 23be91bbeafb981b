"""Can one client change another's message? The adversary chooses the others: copies of one client in chaos.

BLUR's term jumps where an update leaves the ball, so with large steps the last bits of training grow into whole
messages. On commit 46f9ae0 a block was as wide as its largest client: a target with 200 samples moved the sum of 239
copies by 199 S, and membership was told 60 of 60 times at ε = 1. The sum may move by S, whoever the others are.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom
from torch import Tensor, nn

from fedblur.core.rng import Rng, Seeded
from fedblur.privacy.mechanisms.gaussian import FixedPoint
from fedblur.training.machine import Machine
from tests.attacks.game import Game, allowed, game, random_samples

FEATURES, EPSILON, DELTA = 64, 1.0, 1e-3
CHAOS = {"steps": 30, "batch_size": 256, "learning_rate": 1.0}
CPU_ENGINES = ["vectorised", "sequential"]


def start(
    folder: Path, others: int, machine: Machine, each: int = 1, heavy: int = 200, seed: int = 0, hidden: int = 64,
    **settings: Any,
) -> Game:  # fmt: skip
    """Copies of the client whom the target's presence moves most, and the target."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, 10))  # a public start
    sizes = [each] * others + [heavy]
    x, y = random_samples(sum(sizes), seed, FEATURES)
    fixed = {"method": "blur+lus", "epsilon": EPSILON, "delta": DELTA, "local": CHAOS, "machine": machine, **settings}
    random = game(folder, sizes, (x, y), _copy(module), **fixed)
    worst = _most_moved(random)
    for client in range(others):
        part = slice(client * each, (client + 1) * each)
        x[part], y[part] = x[worst * each : (worst + 1) * each], y[worst * each : (worst + 1) * each]
    (folder / "copies").mkdir()
    return game(folder / "copies", sizes, (x, y), _copy(module), **fixed)


def _copy(module: nn.Module) -> nn.Module:
    made = nn.Sequential(*(type(part)(*_shape(part)) for part in module))
    made.load_state_dict(module.state_dict())
    return made


def _shape(part: nn.Module) -> tuple[int, ...]:
    return (part.in_features, part.out_features) if isinstance(part, nn.Linear) else ()


def _most_moved(played: Game) -> int:
    """The other client with no likeness of its message once the target is there."""
    without, with_target = played.rows(False).double(), played.rows(True).double()
    return int(torch.cdist(without, with_target).amin(1).argmax())


def changed(played: Game) -> int:
    """How many of the others' messages differ, in any bit, with the target."""
    with_target, without = (Counter(row.numpy().tobytes() for row in played.rows(there)) for there in (True, False))
    return sum((without - with_target).values())


def moved(played: Game) -> float:
    """How far the sum of whole numbers moves with the target, in units of S."""
    release = played.release
    steps = (played.total(True) - played.total(False)).double().norm()
    return float(steps) * FixedPoint.of(release).step / release.clip_norm


def guesses(played: Game, trials: int, rng: Rng | None = None) -> int:
    """How often the best adversary for two known sums is right: on which side of their middle is the release?"""
    sums = [played.total(there).double() for there in (False, True)]
    along = torch.nn.functional.normalize(sums[1] - sums[0], dim=0)
    middle = float((sums[0] + sums[1]) @ along) / 2

    def adversary(models: list[Tensor]) -> bool:
        return float(played.whole(models[0]) @ along) > middle

    return played.right(adversary, trials, rng)


@pytest.mark.parametrize(("engine", "others"), [("vectorised", 239), ("sequential", 59)])
def test_interfere__60_trials_are_at_chance(tmp_path: Path, engine: Any, others: int) -> None:
    """The best adversary is right with probability Φ(1/2σ), 58 %, where (ε, δ) allows 73 %: 35 of 60 on average.

    Chance alone passes 36 about one time in three, so the noise is seeded. Of twelve seeds (29 to 43 right, 34.5 on
    average) this one had 33 and 31, near the middle. What decides are the first two lines, and the long test below.
    """
    played = start(tmp_path, others, Machine(device="cpu", engine=engine))
    assert changed(played) == 0
    assert 0.9 < moved(played) <= 1
    assert guesses(played, 60, Seeded.root(4)) <= 36


VARIANTS: dict[str, dict[str, Any]] = {
    "several samples each": {"each": 3, "local": {**CHAOS, "batch_size": 2}},
    "a target of one, among clients of 40": {"each": 40, "heavy": 1, "local": {**CHAOS, "batch_size": 16}},
    "one step": {"local": {**CHAOS, "steps": 1}},
    "sampled": {"sample_rate": 0.5},
    "without methods": {"method": []},
    "a small model": {"hidden": 5},
    "normalised, adaptive, masked": {"bounding": "normalise", "clipping": {"name": "adaptive", "bit_noise": 20.0}},
}


ONE_BY_ONE = ("several samples each", "sampled")  # in turn a client cannot see another; the rest is for make test-long


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "vectorised") for name in VARIANTS),
        *(pytest.param(name, "sequential", marks=() if name in ONE_BY_ONE else pytest.mark.long) for name in VARIANTS),
    ],
)
def test_interfere__in_no_variant_is_another_message_touched(tmp_path: Path, name: str, engine: Any) -> None:
    machine = Machine(device="cpu", engine=engine)
    played = start(tmp_path, 30, machine, **{"local": {**CHAOS, "steps": 12}, **VARIANTS[name]})
    assert changed(played) == 0
    assert moved(played) <= 1


@pytest.mark.long
@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_interfere__2000_trials_stay_below_what_the_claim_allows(tmp_path: Path, engine: Any, seed: int) -> None:
    """Noise of the operating system; by chance this fails less than once in 10⁶ times at the allowed rate."""
    played = start(tmp_path, 239, Machine(device="cpu", engine=engine), seed=seed)
    assert changed(played) == 0
    trials = 2000
    share = allowed(EPSILON, DELTA, trials) / trials
    assert guesses(played, trials) <= binom.isf(1e-6, trials, share)
    assert guesses(played, trials) <= 0.65 * trials


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_interfere__on_a_gpu_is_at_chance(tmp_path: Path, precision: Any) -> None:
    played = start(tmp_path, 239, Machine(device="cuda", engine="vectorised", precision=precision))
    assert changed(played) == 0
    assert moved(played) <= 1
    assert guesses(played, 60, Seeded.root(6)) <= 36
