"""A run folder is a small state machine: whatever a kill or damage leaves, there is a way on, and nothing is lost."""

import json
import shutil
from pathlib import Path

import pytest

import fedblur
from fedblur.core import files
from fedblur.core.callbacks import SAVED
from fedblur.core.errors import PrivacyError, RunError
from fedblur.experiments import search_runner
from fedblur.experiments.private_search import make_search
from fedblur.experiments.search_runner import load_data, run_search
from fedblur.privacy.ledger import Ledger, read_spends
from fedblur.privacy.ledger_file import open_ledger
from fedblur.privacy.private_selection import TrialCount
from fedblur.training.checkpoint import load_newest, save_checkpoint
from fedblur.training.machine import Machine
from fedblur.training.run_folder import RunFolder
from fedblur.training.verify_ledger import verify

PRIVATE = fedblur.Config(noise_multiplier=2.0, rounds=4, sample_rate=0.2, clients=60, checkpoint_every=2)


def spends(run: Path) -> int:
    return len(read_spends(open_ledger(run / "ledger.jsonl").links))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "private"
    fedblur.train(PRIVATE, out=path)
    return path


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def content(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.iterdir()) if path.is_file()}


def test_resume__of_a_finished_private_run_with_a_damaged_checkpoint_changes_nothing(copy: Path) -> None:
    """One flipped byte made resume fall back, refuse the budget, and write the older model and summary all the same."""
    newest = max((copy / "checkpoints").iterdir())
    data = bytearray(newest.read_bytes())
    data[-5] ^= 1
    newest.write_bytes(data)
    before = content(copy)
    with pytest.raises(PrivacyError, match="is of round 2, but the budget is spent: .* the model of round 4 is kept"):
        fedblur.resume(copy)
    assert content(copy) == before


def test_model__is_never_replaced_by_one_of_an_earlier_round(tmp_path: Path) -> None:
    """Stopped at 4, its newest checkpoint lost, and stopped again at 3 with budget left."""

    def stop_at(round_: int):
        def watch(row) -> None:
            if row["round"] == round_:
                raise KeyboardInterrupt

        return watch

    run = tmp_path / "run"
    config = fedblur.Config(epsilon=8.0, rounds=8, sample_rate=0.2, clients=60, checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        fedblur.train(config, out=run, watch=stop_at(4))
    model, summary = (run / "model.safetensors").read_bytes(), json.loads((run / "summary.json").read_text())
    max((run / "checkpoints").iterdir()).unlink()
    with pytest.raises(KeyboardInterrupt):
        fedblur.resume(run, watch=stop_at(3))
    assert (run / "model.safetensors").read_bytes() == model
    after = json.loads((run / "summary.json").read_text())
    assert (after["rounds"], after["accuracy"]) == (4, summary["accuracy"])
    assert after["privacy"]["releases"] == spends(run) == 5  # what was spent again is stated
    assert after["privacy"]["epsilon"] > summary["privacy"]["epsilon"]
    assert verify(run) == []


@pytest.mark.parametrize("moment", ["killed", "the disk is full"])
def test_first_checkpoint__that_was_never_written_does_not_wedge_the_folder(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(path: Path, *args: object) -> None:
        raise Killed if moment == "killed" else RunError(f"{path} cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fedblur.training.checkpoint.write_atomically", die)
        with pytest.raises((Killed, RunError)):
            fedblur.train(PRIVATE, out=tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert folder.stage() == "prepared"
    with pytest.raises(RunError, match="ended before its first round; start it again: fedblur run .*config.json --out"):
        fedblur.resume(folder.path)
    with pytest.raises(RunError, match="another configuration"):
        fedblur.train(fedblur.Config(rounds=9), out=folder.path)
    assert fedblur.train(PRIVATE, out=folder.path).record.complete
    assert verify(folder.path) == []


def test_abandon__keeps_a_ledger_that_holds_a_release(tmp_path: Path, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    (copy / "summary.json").unlink()
    folder = RunFolder(copy)
    assert folder.stage() == "broken"
    folder.abandon()
    assert folder.ledger.exists()
    for act in (lambda: fedblur.resume(copy), lambda: fedblur.train(PRIVATE, out=copy)):
        with pytest.raises(RunError, match="has releases in its ledger and no checkpoint"):
            act()
    assert spends(copy) == 4


def test_checkpoint__knows_its_round(tmp_path: Path, finished: Path) -> None:
    """One bit in the header's round once made `stopped after 90 of 60 rounds`, verified."""
    checkpoint, _ = load_newest(finished / "checkpoints")
    path = save_checkpoint(tmp_path, checkpoint)
    data = path.read_bytes()
    for bit in range(8):
        place = data.index(b'round\\": 4') + len(b'round\\": ')
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        with pytest.raises(RunError, match="no usable checkpoint"):
            load_newest(tmp_path)
    path.write_bytes(data)
    path.rename(tmp_path / "round-000009.safetensors")
    with pytest.raises(RunError, match="no usable checkpoint"):
        load_newest(tmp_path)


def test_rounds__a_byte_that_is_not_utf_8_does_not_block_resume(copy: Path) -> None:
    (copy / "rounds.jsonl").write_bytes(b"\xff" + (copy / "rounds.jsonl").read_bytes() + b'{"round": "x"}\n[]\n')
    assert [row["round"] for row in RunFolder(copy).read_rounds()] == [2, 3, 4]
    assert fedblur.resume(copy).record.complete


def test_files__with_local_figures_are_for_this_user_alone(finished: Path) -> None:
    assert "clipped_share" in json.loads((finished / "summary.json").read_text())["local_only"]
    for name in ("rounds.jsonl", "summary.json"):
        assert (finished / name).stat().st_mode & 0o077 == 0
    assert (finished / "statement.json").stat().st_mode & 0o044 != 0


def test_temporary_files__of_a_killed_writer_go_when_the_folder_is_taken_again(copy: Path) -> None:
    stale = [copy / ".summary.json.123.tmp", copy / "checkpoints" / ".round-000004.safetensors.9.tmp"]
    for path in stale:
        path.write_bytes(b"half")
    fedblur.resume(copy)
    assert not any(path.exists() for path in stale)


def test_search__that_released_its_winner_releases_no_second_one(tmp_path: Path) -> None:
    """Remove summary.json, run it again: four winners came from one line of the ledger."""
    configs = [
        fedblur.Config(noise_multiplier=4.0, rounds=2, sample_rate=0.2, clients=60, clip_norm=s) for s in (0.1, 1)
    ]
    data = load_data(configs, Machine())
    search = make_search(configs, data, TrialCount(shape=1.0, mean=3.0), "public")
    run_search(search, tmp_path / "out", Machine(), data)
    for gone in ("summary.json", "model.safetensors"):
        (tmp_path / "out" / gone).unlink(missing_ok=True)
    with pytest.raises(RunError, match="holds the winner of a search"):
        run_search(search, tmp_path / "out", Machine(), data)
    lines = (tmp_path / "out" / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out" / "ledger.jsonl").write_bytes(b"".join(lines[:2]))  # as if it had never been closed
    with pytest.raises(RunError, match="was paid for, and .* is gone: it cannot continue"):
        run_search(search, tmp_path / "out", Machine(), data)
    assert spends(tmp_path / "out") == 1


def test_search__releases_no_trial_that_was_damaged_after_it_was_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [
        fedblur.Config(noise_multiplier=4.0, rounds=1, sample_rate=0.2, clients=60, clip_norm=s, seed=1) for s in (1, 2)
    ]
    data = load_data(configs, Machine())
    search = make_search(configs, data, TrialCount(shape=1.0, mean=1.5), "public")

    def die(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(search_runner, "_release", die)
        run_search(search, tmp_path / "out", Machine(), data)
    trials = sorted((tmp_path / "out-local-only").glob("trial-*"))
    for path in trials:
        model = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(model[:-1] + bytes([model[-1] ^ 1]))
    with pytest.raises(RunError, match=r"trial-\d was damaged after it was scored; delete that folder"):
        run_search(search, tmp_path / "out", Machine(), data)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    for path in trials:
        shutil.rmtree(path)
    run_search(search, tmp_path / "out", Machine(), data)
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize("again", [False, True])
def test_stop__says_saved_once_all_that_was_paid_for_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """A second Ctrl-C, while the first one saves, was told that progress is saved."""

    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    if again:
        monkeypatch.setattr(RunFolder, "write_summary", stop)
    with pytest.raises(KeyboardInterrupt) as stopped:
        fedblur.train(PRIVATE, out=tmp_path / "run", watch=stop)
    assert (SAVED in " ".join(getattr(stopped.value, "__notes__", ()))) == (not again)
    assert (tmp_path / "run" / "summary.json").exists() == (not again)


def test_summary__without_any_figure_is_damaged(copy: Path) -> None:
    path = copy / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"accuracy": None}))
    with pytest.raises(RunError, match=r"summary\.json is not what fedblur writes: .*has an accuracy or figures"):
        RunFolder(copy).read_summary()


def test_read_json__turns_damage_into_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for damage, words in (
        (b"", "Expecting value"),
        (b"\xff{}", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", "holds a list, where fedblur writes an object"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "key 'b' is there twice"),
    ):
        path.write_bytes(damage)
        with pytest.raises(RunError, match=words) as error:
            files.read_json(path)
        assert "\n" not in str(error.value)
    with path.open("wb") as file:
        file.truncate(files.MOST_BYTES + 1)
    with pytest.raises(RunError, match="larger than 256 MiB"):
        files.read_json(path)
    with pytest.raises(RunError, match="Is a directory|not a regular file"):
        files.read_json(tmp_path)


def test_ledger__is_parsed_once_however_often_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that evaluated every round read its whole ledger each time: quadratic."""
    from fedblur.privacy import events, ledger

    event, parsed = events.PoissonSampled(0.1, events.Gaussian(5.0)), []
    made = Ledger(tmp_path / "ledger.jsonl", ledger.Budget(float("inf"), 1e-3, "pld", 1000))
    read = json.loads
    monkeypatch.setattr(ledger.json, "loads", lambda line: parsed.append(1) or read(line))
    for round_ in range(1, 101):
        made.spend(round_, event, replay=False)
        made.epsilon()
        made.spends()
    assert len(parsed) <= 100
    again = Ledger(tmp_path / "ledger.jsonl", made.budget)
    assert len(again.spends()) == 100
    again.epsilon()
    assert len(parsed) <= 202
