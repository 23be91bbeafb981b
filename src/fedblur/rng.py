"""Randomness as an argument, from named streams: `rng.child("round", 3, "client", 17)`.

With a seed, every stream is a pure function of the seed and its path: the same on every engine and after a resume.
Without one, noise and sampling are drawn from the operating system's generator (CSPRNG) and cannot be replayed by
anyone. A seeded run is for science, not for privacy: whoever knows the seed can subtract the noise.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Rng(Protocol):
    """A named stream of randomness."""

    @property
    def private(self) -> bool:
        """Whether nobody can replay what this stream gives."""
        ...

    def child(self, *path: str | int) -> Rng: ...

    def seed(self) -> int:
        """63 bits to seed a generator whose output needs no secrecy (shuffles, initial weights, dropout)."""
        ...

    def seeds(self, name: str, numbers: Iterable[int]) -> list[int]:
        """The seeds of many children of one name: `child(name, number).seed()` for each number."""
        ...

    def uniform(self, count: int) -> NDArray[np.float64]:
        """`count` floats in [0, 1) with 53 random bits each."""
        ...

    def normal(self, count: int, device: torch.device) -> Tensor:
        """`count` standard normal float32 values on the device."""
        ...

    def numpy(self) -> np.random.Generator:
        """A fast generator for what needs no secrecy."""
        ...


@dataclass(frozen=True)
class Seeded:
    """Streams that follow from a seed. NOT PRIVATE."""

    key: bytes
    private: bool = False

    @classmethod
    def root(cls, seed: int) -> Seeded:
        return cls(hashlib.blake2b(f"fedblur:{seed}".encode(), digest_size=32).digest())

    def child(self, *path: str | int) -> Seeded:
        label = "/".join(map(str, path)).encode()
        return Seeded(hashlib.blake2b(label, key=self.key, digest_size=32).digest())

    def seed(self) -> int:
        return int.from_bytes(self.key[:8], "little") >> 1

    def seeds(self, name: str, numbers: Iterable[int]) -> list[int]:
        begun, found = hashlib.blake2b(f"{name}/".encode(), key=self.key, digest_size=32), []
        for number in numbers:
            child = begun.copy()  # a third of the time of a stream for each
            child.update(str(number).encode())
            found.append(int.from_bytes(child.digest()[:8], "little") >> 1)
        return found

    def numpy(self) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self.key[:16], "little")))

    def uniform(self, count: int) -> NDArray[np.float64]:
        return self.numpy().random(count)

    def normal(self, count: int, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return torch.from_numpy(self.numpy().standard_normal(count, dtype=np.float32))
        generator = torch.Generator(device).manual_seed(self.seed())
        return torch.randn(count, generator=generator, device=device)


@dataclass(frozen=True)
class System:
    """Streams from the operating system's CSPRNG. Every call is fresh; paths only name what it is for."""

    private: bool = True

    def child(self, *path: str | int) -> System:
        return self

    def seed(self) -> int:
        return int.from_bytes(os.urandom(8), "little") >> 1

    def seeds(self, name: str, numbers: Iterable[int]) -> list[int]:
        return [self.child(name, number).seed() for number in numbers]

    def numpy(self) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=int.from_bytes(os.urandom(16), "little")))

    def uniform(self, count: int) -> NDArray[np.float64]:
        bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def normal(self, count: int, device: torch.device) -> Tensor:
        """Box and Muller's transform in float64, so that the tail reaches 8.5 standard deviations."""
        half = (count + 1) // 2
        radius = np.sqrt(-2.0 * np.log1p(-self.uniform(half)))  # 1 - u is in (0, 1]
        angle = 2.0 * math.pi * self.uniform(half)
        pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
        return torch.from_numpy(pairs.astype(np.float32)).to(device)


def make_rng(seed: int | None) -> Rng:
    """Streams from a seed, or from the operating system when there is none."""
    return System() if seed is None else Seeded.root(seed)
