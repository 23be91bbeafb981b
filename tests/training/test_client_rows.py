"""Rows of personal parts in a run folder: they fit the checkpoint that a run falls back to, whatever happened."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedblur.core.errors import ConfigError, RunError
from fedblur.learning.personal import CohortRows, Personal
from fedblur.training.checkpoint import Checkpoint, load_newest, rounds_kept, save_checkpoint
from fedblur.training.client_rows import RowsInMemory, RowsOnDisk, read_personal
from tests.learning.test_personal import Net, job_of
from tests.sweeps.disk import MODES, Disk, Killed

CLIENTS, ROUNDS, EVERY = 9, 5, 2


def personal() -> Personal:
    found = job_of(Net(), ("head.bias",)).personal
    assert found is not None
    return found


def cohort(round_: int) -> torch.Tensor:
    return torch.tensor([(3 * round_ + i * i) % CLIENTS for i in range(3)]).unique()


def trained(round_: int, rows: CohortRows) -> CohortRows:
    """What a round makes of its cohort's rows: it depends on the round and on what each row was."""
    return CohortRows(rows.ids, rows.values * 1.5 + round_ + rows.ids[:, None])


def expected(round_: int) -> torch.Tensor:
    rows = RowsInMemory(personal().initial)
    for each in range(1, round_ + 1):
        rows.stage(each, trained(each, rows.fetch(cohort(each), each)))
    return rows.read(torch.arange(CLIENTS))


def save(run: Path, rows: RowsOnDisk, round_: int) -> None:
    rows.settle(round_)
    save_checkpoint(run / "checkpoints", Checkpoint(round_, {"theta": torch.ones(2)}, {}))
    rows.checkpointed(round_, rounds_kept(run / "checkpoints")[-1])


def go_on(run: Path, rows: RowsOnDisk, first: int) -> None:
    for round_ in range(first, ROUNDS + 1):
        rows.stage(round_, trained(round_, rows.fetch(cohort(round_), round_)))
        if round_ % EVERY == 0 or round_ == ROUNDS:
            save(run, rows, round_)


def whole_run(run: Path) -> RowsOnDisk:
    rows = RowsOnDisk(run / "personal", personal(), CLIENTS)
    rows.begin()
    save(run, rows, 0)
    go_on(run, rows, 1)
    return rows


def restored(run: Path) -> tuple[int, RowsOnDisk]:
    round_ = load_newest(run / "checkpoints")[0].round
    rows = RowsOnDisk(run / "personal", personal(), CLIENTS)
    rows.restore(round_)
    return round_, rows


def test_rows__hold_what_each_client_s_last_round_left(tmp_path: Path) -> None:
    rows = whole_run(tmp_path)
    assert torch.equal(rows.read(torch.arange(CLIENTS)), expected(ROUNDS))
    never = RowsOnDisk(tmp_path / "other", personal(), CLIENTS)
    never.begin()
    assert torch.equal(never.read(torch.arange(CLIENTS)), personal().initial.repeat(CLIENTS, 1))


def test_rows__are_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        whole_run(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "personal").stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "personal").iterdir()}
    assert {"rows.bin", "rows.json"} < modes.keys()
    assert set(modes.values()) == {0o600}


def test_rows__of_millions_take_space_only_where_somebody_trained(tmp_path: Path) -> None:
    rows = RowsOnDisk(tmp_path / "personal", personal(), 50_000_000)
    rows.begin()
    ids = torch.tensor([0, 7, 31_234_567, 49_999_999])
    rows.stage(1, CohortRows(ids, torch.arange(12.0).view(4, 3)))
    assert torch.equal(rows.fetch(ids, 2).values, torch.arange(12.0).view(4, 3))
    assert rows.file.stat().st_size == 50_000_000 * 20
    assert rows.file.stat().st_blocks * 512 < 2**17


def test_rows__a_round_that_was_cut_off_did_not_happen(tmp_path: Path) -> None:
    """Ctrl-C between a round's end and its bookkeeping: the checkpoint of the round before keeps its rows."""
    rows = whole_run(tmp_path)
    rows.stage(ROUNDS + 1, trained(ROUNDS + 1, rows.fetch(cohort(ROUNDS + 1), ROUNDS + 1)))
    save(tmp_path, rows, ROUNDS)
    assert torch.equal(rows.read(torch.arange(CLIENTS)), expected(ROUNDS))


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: these tests sync a thousand times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


_LONG = ("before", "after", "power", "full")  # the others find what these find


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.long) if mode in _LONG else mode for mode in MODES]
)
def test_crash__at_every_file_operation_leaves_the_rows_of_the_checkpoint(mode: str, quick: Path) -> None:
    with Disk(quick / "whole").active() as disk:
        whole_run(quick / "whole")
    finished = (quick / "whole" / "personal" / "rows.bin").read_bytes()
    tried = 0
    for at, operation in enumerate(disk.operations):
        if mode not in operation.modes():
            continue
        run = quick / f"{at}"
        run.mkdir()
        try:
            with Disk(run, at, mode).active():
                whole_run(run)
        except (Killed, RunError):
            pass
        if not any((run / "checkpoints").glob("round-*")):
            continue  # before the first checkpoint: the run starts again
        round_, rows = restored(run)
        tried += 1
        assert torch.equal(rows.read(torch.arange(CLIENTS)), expected(round_)), (at, operation)
        go_on(run, rows, round_ + 1)
        assert (run / "personal" / "rows.bin").read_bytes() == finished, (at, operation)
    assert tried > 10


def test_crash__of_a_resume_is_repaired_by_the_next_one(quick: Path) -> None:
    """Going back is killed too, at each operation: it can be done again."""
    for at in range(40):
        run = quick / f"{at}"
        run.mkdir()
        rows = whole_run(run)
        (run / "checkpoints" / f"round-{ROUNDS:06d}.safetensors").write_bytes(b"damaged")
        rows.stage(ROUNDS + 1, trained(ROUNDS + 1, rows.fetch(cohort(ROUNDS + 1), ROUNDS + 1)))
        rows.settle(ROUNDS + 1)  # beyond the last checkpoint, which is damaged
        disk = Disk(run, at, ("before", "torn", "names")[at % 3])
        try:
            with disk.active():
                restored(run)
        except Killed:
            round_, rows = restored(run)
            assert round_ == 4
            assert torch.equal(rows.read(torch.arange(CLIENTS)), expected(4)), at
        else:
            break
    assert at > 3


def test_interrupt__while_old_rows_are_saved_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a write: the same rows are written again when the run saves what was paid for."""
    from fedblur.training import client_rows

    rows, real, left = whole_run(tmp_path), client_rows.write_in_place, [1]

    def cut(path, pieces):
        pieces = list(pieces)
        if left and "before" in path.name:
            left.pop()
            real(path, [(offset, data[: len(data) // 2]) for offset, data in pieces])
            raise KeyboardInterrupt
        real(path, pieces)

    monkeypatch.setattr(client_rows, "write_in_place", cut)
    for round_ in (ROUNDS + 1, ROUNDS + 2):
        begin = rows.fetch(cohort(round_), round_) if round_ == ROUNDS + 1 else None
        if begin is None:
            with pytest.raises(KeyboardInterrupt):
                rows.fetch(cohort(round_), round_)
            begin = rows.fetch(cohort(round_), round_)
        rows.stage(round_, trained(round_, begin))
    rows.settle(ROUNDS + 2)
    assert torch.equal(rows.read(torch.arange(CLIENTS)), expected(ROUNDS + 2))
    _, again = restored(tmp_path)
    assert torch.equal(again.read(torch.arange(CLIENTS)), expected(ROUNDS))


def test_damage__is_found_and_named(tmp_path: Path) -> None:
    whole_run(tmp_path)
    folder = tmp_path / "personal"
    good = {path: path.read_bytes() for path in folder.iterdir()}
    client = int(cohort(ROUNDS)[0])
    flipped = bytearray(good[folder / "rows.bin"])
    flipped[client * 20 + 9] ^= 1
    (folder / "rows.bin").write_bytes(flipped)
    with pytest.raises(RunError, match=rf"the row of client {client} is damaged; restore the folder"):
        restored(tmp_path)[1].fetch(torch.arange(CLIENTS), ROUNDS + 1)
    with pytest.raises(RunError, match="is damaged"):
        read_personal(folder, client)
    (folder / "rows.bin").write_bytes(good[folder / "rows.bin"][:-1])
    with pytest.raises(RunError, match="179 bytes in place of 180"):
        restored(tmp_path)
    (folder / "rows.bin").unlink()
    with pytest.raises(RunError, match="cannot be read"):
        restored(tmp_path)
    (folder / "rows.bin").write_bytes(good[folder / "rows.bin"])
    for broken in (b"{}", b"no json", b'{"clients": 8, "names": ["head.bias"], "shapes": [[3]], "parameters": []}'):
        (folder / "rows.json").write_bytes(broken)
        with pytest.raises(RunError, match=r"rows\.json"):
            restored(tmp_path)
    (folder / "rows.json").unlink()
    with pytest.raises(RunError, match="is missing"):
        restored(tmp_path)


def test_damage__rows_later_than_the_checkpoint_are_refused(tmp_path: Path) -> None:
    """A folder of which somebody removed what it could go back with."""
    whole_run(tmp_path)
    for path in [*(tmp_path / "personal").glob("before-*"), *(tmp_path / "checkpoints").glob("*5.safetensors")]:
        path.unlink()
    with pytest.raises(RunError, match="rows of rounds after 4"):
        restored(tmp_path)


def test_read_personal__names_a_client_that_is_not_there(tmp_path: Path) -> None:
    whole_run(tmp_path)
    (bias,) = (read_personal(tmp_path / "personal", int(cohort(ROUNDS)[0])) or {}).values()
    assert torch.equal(bias, expected(ROUNDS)[int(cohort(ROUNDS)[0])])
    for client in (-1, CLIENTS):
        with pytest.raises(ConfigError, match=rf"client={client} must be one of 0\.\.8"):
            read_personal(tmp_path / "personal", client)
