"""Keys of correlated noise: a step is released once, earlier noise is made again, and a copied folder has no keys."""

import json
import os
import stat

import numpy as np
import pytest

from fedblur.core.errors import PrivacyError, RunError
from fedblur.privacy.mechanisms.correlated import NoiseStream
from fedblur.privacy.mechanisms.noise_recursion import Banded
from fedblur.privacy.noise_key import NoiseKey

LEDGER = "0123456789abcdef"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBLUR_POPULATIONS", str(tmp_path))
    return tmp_path


def stream(key: NoiseKey) -> NoiseStream:
    return NoiseStream(lambda: Banded((2**19, 2**18)), key)


def noise(made: NoiseStream, step: int) -> list[int]:
    return made.make(step, 2.0**20, 5).tolist()


def test_noise__of_a_run_that_goes_on_continues_what_was_released() -> None:
    key = NoiseKey.of(LEDGER, 0)
    before = stream(key)
    released = [noise(before, step) for step in (1, 2, 3)]
    key.serve(1), key.serve(2), key.serve(3)
    after = stream(NoiseKey.of(LEDGER, 3))
    assert [noise(after, step) for step in (1, 2, 3)] == released
    fresh = np.array(noise(after, 4)) + np.array(noise_taken_off(released))
    assert (np.abs(fresh) < 32 * 2**20).all()
    assert noise(after, 4) != noise(before, 4)  # by a key of its own


def noise_taken_off(released: list[list[int]]) -> list[int]:
    return [round(last / 2 + before / 4) for last, before in zip(released[2], released[1], strict=True)]


def test_step__that_was_served_is_refused_in_this_process_and_the_next() -> None:
    key = NoiseKey.of(LEDGER, 0)
    key.serve(1)
    with pytest.raises(PrivacyError, match="step 1 was released"):
        key.serve(1)
    again = NoiseKey.of(LEDGER, 0)
    with pytest.raises(PrivacyError, match="step 1 was released"):
        again.serve(1)
    again.serve(2)


def test_step__that_was_paid_counts_as_served_though_a_kill_came_first() -> None:
    NoiseKey.of(LEDGER, 0).serve(1)
    key = NoiseKey.of(LEDGER, 4)
    assert key.served == 4
    with pytest.raises(PrivacyError, match="step 4 was released"):
        key.serve(4)


def test_keys__that_were_put_back_make_other_noise_from_there_on(home) -> None:
    """A snapshot of the machine: the same step is released twice, but its noise does not cancel out."""
    key = NoiseKey.of(LEDGER, 0)
    key.serve(1)
    path = next(home.glob(".noise/*.json"))
    kept = path.read_bytes()
    second = noise(stream(NoiseKey.of(LEDGER, 1)), 2)
    path.write_bytes(kept)
    assert noise(stream(NoiseKey.of(LEDGER, 1)), 2) != second


def test_keys__are_for_their_owner_alone_and_go_with_the_run(home) -> None:
    os.umask(0o022)
    key = NoiseKey.of(LEDGER, 0)
    assert not (home / ".noise").exists()  # until something is released
    key.serve(1)
    assert stat.S_IMODE((home / ".noise").stat().st_mode) == 0o700
    assert stat.S_IMODE(key.path.stat().st_mode) == 0o600
    key.forget()
    assert not key.path.exists()
    with pytest.raises(RunError, match="noise keys of this run are not here"):
        NoiseKey.of(LEDGER, 1)


def test_keys__that_were_damaged_are_one_line(home) -> None:
    key = NoiseKey.of(LEDGER, 0)
    key.serve(1)
    table = json.loads(key.path.read_text())
    key.path.write_text(json.dumps(table | {"served": 0}))
    with pytest.raises(RunError, match="damaged or edited"):
        NoiseKey.of(LEDGER, 1)
    key.path.write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        NoiseKey.of(LEDGER, 1)


def test_keys__that_a_copy_of_the_run_uses_too_are_refused() -> None:
    NoiseKey.of(LEDGER, 0).serve(1)
    one, other = NoiseKey.of(LEDGER, 1), NoiseKey.of(LEDGER, 1)
    one.serve(2)
    with pytest.raises(PrivacyError, match="changed by another process"):
        other.serve(2)
    one.serve(3)
