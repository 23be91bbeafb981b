"""Checkpoints are atomic, checked, and two deep."""

from pathlib import Path

import pytest
import torch

from fedblur.core.errors import RunError
from fedblur.core.files import write_atomically
from fedblur.training.checkpoint import Checkpoint, load_newest, rounds_kept, save_checkpoint


def checkpoint(round_: int) -> Checkpoint:
    return Checkpoint(
        round_, {"theta": torch.full((5,), float(round_)), "server.m": torch.zeros(5)}, {"config": {"a": 1}}
    )


def test_checkpoint__round_trip_and_the_newest_two_are_kept(tmp_path: Path) -> None:
    for t in range(4):
        save_checkpoint(tmp_path, checkpoint(t))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "round-000002.safetensors",
        "round-000003.safetensors",
    ]
    loaded, notes = load_newest(tmp_path)
    assert (loaded.round, notes, loaded.state) == (3, [], {"config": {"a": 1}})
    assert torch.equal(loaded.tensors["theta"], torch.full((5,), 3.0))


def test_checkpoint__the_newest_is_the_one_of_the_last_round_whatever_else_lies_there(tmp_path: Path) -> None:
    for t in (999_999, 1_000_000):  # names of different lengths
        save_checkpoint(tmp_path, checkpoint(t))
    copy = tmp_path / "round-1000000 (copy).safetensors"
    copy.write_bytes((tmp_path / "round-1000000.safetensors").read_bytes())
    assert rounds_kept(tmp_path) == [1_000_000, 999_999]
    save_checkpoint(tmp_path, checkpoint(1_000_001))
    assert rounds_kept(tmp_path) == [1_000_001, 1_000_000]
    assert copy.exists()


def test_checkpoint__every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1))
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            loaded, _ = load_newest(tmp_path)
        except RunError:
            continue
        assert loaded == checkpoint(1) or torch.equal(loaded.tensors["theta"], checkpoint(1).tensors["theta"])


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:-4] + b"\0\0\1\0"])
def test_checkpoint__corrupt_newest_falls_back_and_says_so(tmp_path: Path, damage) -> None:
    save_checkpoint(tmp_path, checkpoint(1))
    newest = save_checkpoint(tmp_path, checkpoint(2))
    newest.write_bytes(damage(newest.read_bytes()))
    loaded, notes = load_newest(tmp_path)
    assert loaded.round == 1
    assert len(notes) == 1
    assert "round-000002.safetensors is corrupt" in notes[0]


def test_checkpoint__none_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no usable checkpoint"):
        load_newest(tmp_path)


def test_write_atomically__a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedblur.core.files.os.fsync", full)
    with pytest.raises(RunError, match="No space left on device; free space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
