"""Invariant 9: OS entropy unless a seed is given; streams are named and independent."""

import os

import numpy as np
import pytest
from scipy import stats

from fedblur.core.rng import Keystream, Seeded, System, make_rng


def words(rng, count: int = 9, lane: int = 0) -> list[int]:
    return rng.keystream().lane(lane).words(count).tolist()


def test_invariant_9__no_seed_means_os_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda n: calls.append(n) or real(n))
    rng = make_rng(None)
    assert rng.private
    rng.child("noise").keystream()
    assert calls == [32]
    rng.child("cohort").uniform(10)
    assert sum(calls) >= 32 + 80
    assert words(rng) != words(rng)


def test_invariant_9__a_seed_is_reproducible_and_not_private() -> None:
    a, b = make_rng(7), make_rng(7)
    assert not a.private
    assert words(a.child("round", 3)) == words(b.child("round", 3))
    assert words(a.child("round", 3)) != words(a.child("round", 4))
    assert words(a) != words(make_rng(8))


def test_invariant_9__a_forked_process_draws_other_noise() -> None:
    """A key is fresh for every draw, so no state is copied by a fork."""
    rng = make_rng(None)
    words(rng)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, repr(words(rng)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 4096).decode() != repr(words(rng))


def test_keystream__is_aes_256_in_counter_mode() -> None:
    """NIST SP 800-38A, F.5.5: the counter block is encrypted with the key; a lane begins at its number times 2^64."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    block = bytes.fromhex("f0f1f2f3f4f5f6f7") + bytes(8)
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    expected = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)
    lane = Keystream(key).lane(int.from_bytes(block[:8], "big"))
    assert lane.words(2).astype("<u8").tobytes() == expected


def test_keystream__goes_on_where_it_ended_and_lanes_differ() -> None:
    stream = Seeded.root(1).keystream()
    lane = stream.lane(5)
    pieces = [*lane.words(3), *lane.words(20_000), *lane.words(1)]
    assert pieces == stream.lane(5).words(20_004).tolist()
    assert stream.lane(6).words(3).tolist() != pieces[:3]


@pytest.mark.parametrize("rng", [System(), Seeded.root(1)])
def test_keystream__bits_are_fair(rng) -> None:
    bits = np.unpackbits(rng.keystream().lane(0).words(50_000).view(np.uint8)).reshape(50_000, 64)
    assert stats.binomtest(int(bits.sum()), bits.size).pvalue > 1e-5
    assert stats.chisquare(bits.sum(0)).pvalue > 1e-5


@pytest.mark.parametrize("rng", [System(), Seeded.root(1)])
def test_rng__uniform_is_in_the_half_open_interval(rng) -> None:
    draws = rng.uniform(100_000)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert stats.kstest(draws, "uniform").pvalue > 1e-4


def test_rng__paths_do_not_collide() -> None:
    root = Seeded.root(0)
    seeds = {root.child("round", t, "client", c).seed() for t in range(50) for c in range(50)}
    assert len(seeds) == 2500
    assert root.child("a", "b").key != root.child("a").key


@pytest.mark.parametrize("name", ["client", "share"])
def test_seeded__many_seeds_are_those_of_the_children(name) -> None:
    root = Seeded.root(3).child("round", 7)
    assert root.seeds(name, [0, 17, -1]) == [root.child(name, i).seed() for i in (0, 17, -1)]


def test_keystream__does_not_show_its_key() -> None:
    """Whoever has it can subtract the noise; errors and logs print what they are about."""
    assert repr(Keystream(b"secret" * 5)) == "Keystream()"
