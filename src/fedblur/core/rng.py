"""Randomness as an argument, from named streams: `rng.child("round", 3, "client", 17)`.

With a seed, every stream is a pure function of the seed and its path: the same on every engine and after a resume.
Without one, noise and sampling come from the operating system's generator, and nobody can replay them. A seeded run is
for science, not for privacy: anyone with the seed can regenerate the noise.

Noise is made from a `Keystream`: AES-256 in counter mode (by the `cryptography` package). Its key comes from the
operating system, fresh for every draw: two processes that forked draw different noise. Noise that was begun before a
fork belongs to the process that began it (`mechanisms/base.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    pass


_ZEROS = bytes(2**16)  # what is encrypted


class Lane:
    """One sequence of random 64-bit words; every call continues where the last one ended."""

    def __init__(self, key: bytes, number: int) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        start = modes.CTR((number << 64).to_bytes(16, "big"))  # lanes are 2^64 blocks apart: none reaches the next
        self._cipher = Cipher(algorithms.AES(key), start).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        buffer = np.empty(8 * count + 16, dtype=np.uint8)  # the cipher asks for room for one block more
        for first in range(0, 8 * count, len(_ZEROS)):
            part = min(len(_ZEROS), 8 * count - first)
            self._cipher.update_into(memoryview(_ZEROS)[:part], buffer.data[first:])
        return buffer[: 8 * count].view("<u8")


@dataclass(frozen=True)
class Keystream:
    """2^64 lanes of random words from one key. Words of one lane say nothing about another."""

    key: bytes = field(repr=False)  # 32 of them; whoever has it can subtract the noise

    def lane(self, number: int) -> Lane:
        return Lane(self.key, number)


class Rng(Protocol):
    """A named stream of randomness."""

    @property
    def private(self) -> bool:
        """Whether nobody can replay this stream."""

    def child(self, *path: str | int) -> Rng: ...

    def seed(self) -> int:
        """Return 63 bits to seed a generator that needs no secrecy (shuffles, initial weights, dropout)."""

    def seeds(self, name: str, numbers: Iterable[int]) -> list[int]:
        """Return the seeds of many children of one name: `child(name, number).seed()` for each number."""

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Draw `count` floats in [0, 1) with 53 random bits each."""

    def keystream(self) -> Keystream:
        """Return a key for noise: from the operating system, and fresh at every call, unless this stream is seeded."""

    def numpy(self) -> np.random.Generator:
        """Return a fast generator for what needs no secrecy."""


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

    def keystream(self) -> Keystream:
        return Keystream(hashlib.blake2b(b"noise", key=self.key, digest_size=32, person=b"keystream").digest())


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

    def keystream(self) -> Keystream:
        return Keystream(os.urandom(32))


def make_rng(seed: int | None) -> Rng:
    """Make streams from a seed, or from the operating system if there is none."""
    return System() if seed is None else Seeded.root(seed)
