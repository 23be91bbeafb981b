"""Which values can a released model have with the target, and which without? (Mironov 2012; Jin et al. 2022)

With float noise a float32 sum reaches some values and not others: on commit 46f9ae0 that told membership 200 of 200
times at ε = 0.5. Noise in whole numbers reaches every value of the public grid from every sum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedblur.core.rng import Seeded
from fedblur.privacy.mechanisms.base import Release
from fedblur.privacy.mechanisms.gaussian import FixedPoint, Gaussian
from fedblur.training.machine import Machine
from tests.attacks.game import Adversary, Game, game

CHANCE = 115  # of 200: what the issue demands
VARIANTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one sample each": ([1] * 40, {}),
    "several samples each": ([3] * 30, {}),
    "a target of 200": ([1] * 30 + [200], {}),
    "several local steps": ([4] * 30, {"local": {"steps": 5, "batch_size": 4, "learning_rate": 0.1}}),
    "blur and lus": ([1] * 30, {"method": "blur+lus", "local": {"steps": 5, "learning_rate": 0.1}}),
    "another model": ([1] * 30, {"model": {"name": "mlp", "hidden": [8]}}),
    "a mask": ([1] * 30, {"mask": "random"}),
}


def start(folder: Path, sizes: list[int], **settings: Any) -> Game:
    return game(folder, sizes, **{"epsilon": 0.5, "local": {"steps": 1, "learning_rate": 0.1}, **settings})


def off_the_grid(played: Game, model: Tensor) -> Tensor:
    """Coordinates of the first model that no whole number gives, by the server's very arithmetic in float32."""
    step, cohort = FixedPoint.of(played.release).step, played.protocol.plan.expected_cohort
    initial, nearest = played.setup.initial.cpu(), played.whole(model).round()
    found = torch.zeros(len(model), dtype=torch.bool)
    for near in (-1, 0, 1):
        found |= (initial + ((nearest + near) * step).float() / cohort) == model
    return ~found & shows_steps(played, model)


def shows_steps(played: Game, model: Tensor) -> Tensor:
    """Where float32 tells one whole number from the next."""
    spacing = np.spacing(np.maximum(model.abs().numpy(), played.setup.initial.abs().cpu().numpy()))
    step = FixedPoint.of(played.release).step / played.protocol.plan.expected_cohort
    return torch.from_numpy(spacing.astype(np.float64) < step / 2)


def by_reach(played: Game) -> Adversary:
    """Count the values that are out of reach without the target and with it; the same: say "absent"."""
    sums = {present: played.total(present).double() for present in (False, True)}
    spread = FixedPoint.of(played.release).scale(played.release.noise_std)

    def adversary(models: list[Tensor]) -> bool:
        whole, off = played.whole(models[0]), off_the_grid(played, models[0])
        out = {there: int((off | ((whole - sums[there]).abs() > 32 * spread)).sum()) for there in sums}
        return out[True] < out[False]

    return adversary


def by_low_bits(played: Game) -> Adversary:
    """The parity of the noise under either guess: the guess under which it is more even is taken."""
    sums = {present: played.total(present) for present in (False, True)}

    def adversary(models: list[Tensor]) -> bool:
        whole, shown = played.whole(models[0]).round().long(), shows_steps(played, models[0])
        odd = {there: float(((whole - sums[there]) % 2)[shown].double().mean()) for there in sums}
        return abs(odd[True] - 0.5) < abs(odd[False] - 0.5)

    return adversary


def test_reachable__200_trials_are_at_chance(tmp_path: Path) -> None:
    """Noise of the operating system. An adversary who sees nothing in any trial is right in exactly half of them."""
    played = start(tmp_path, [1] * 40)
    assert played.right(by_reach(played), 200) <= CHANCE


@pytest.mark.parametrize("name", list(VARIANTS)[1:])
def test_reachable__variants_are_at_chance(tmp_path: Path, name: str) -> None:
    sizes, settings = VARIANTS[name]
    played = start(tmp_path, sizes, **settings)
    assert played.right(by_reach(played), 40) <= CHANCE * 40 // 200


@pytest.mark.parametrize("seed", [0, 1])
def test_reachable__low_bits_are_at_chance(tmp_path: Path, seed: int) -> None:
    """The guesses are coin flips: seeded, or one time in seventy more than 115 would be right."""
    played = start(tmp_path, [1] * 40)
    assert played.right(by_low_bits(played), 200, Seeded.root(seed)) <= CHANCE


def test_reachable__with_sampling_no_value_is_off_the_grid(tmp_path: Path) -> None:
    """p < 1: the adversary does not know the cohort, so only the grid itself could give anyone away."""
    played = start(tmp_path, [2] * 40, sample_rate=0.3, rounds=3)
    for trial in range(20):
        (first, *_) = played.play(bool(trial % 2), played.setup.rng)
        assert not off_the_grid(played, first).any()


def test_reachable__float_noise_is_seen_in_most_single_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adversary is no straw man: in most releases with float noise it finds values that no whole number gives."""

    def floats(self: Gaussian, total: Tensor, release: Release, noise: Tensor) -> Tensor:
        step = FixedPoint.of(release).step
        sample = (noise.double() * step / release.noise_std).float()
        return (total.double() * step + release.noise_std * sample.double()).float()

    monkeypatch.setattr(Gaussian, "release", floats)
    played = start(tmp_path, [1] * 40)
    models = [played.play(bool(trial % 2), Seeded.root(trial))[0] for trial in range(20)]
    seen = [bool(off_the_grid(played, model).any()) for model in models]
    assert sum(seen) >= 15  # about eight of 170 values are small enough for float32 to show single steps


def test_reachable__even_noise_gives_the_target_away_by_its_low_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Gaussian.release
    monkeypatch.setattr(
        Gaussian, "release", lambda self, total, release, noise: honest(self, total, release, noise // 2 * 2 + 1)
    )
    played = start(tmp_path, [1] * 40)

    def by_oddness(models: list[Tensor]) -> bool:
        whole, shown = played.whole(models[0]).round().long(), shows_steps(played, models[0])
        return bool((((whole - played.total(True)) % 2)[shown] == 1).all())

    assert played.right(by_oddness, 40, Seeded.root(0)) >= 38


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_reachable__200_trials_of_every_variant(tmp_path: Path, name: str, seed: int) -> None:
    sizes, settings = VARIANTS[name]
    played = start(tmp_path, sizes, seed=seed + 10, **settings)
    assert played.right(by_reach(played), 200) <= CHANCE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_reachable__in_bf16_on_a_gpu_is_at_chance(tmp_path: Path) -> None:
    machine = Machine(device="cuda", engine="vectorised", precision="bf16")
    played = start(tmp_path, [1] * 40, machine=machine)
    assert played.right(by_reach(played), 200) <= CHANCE
