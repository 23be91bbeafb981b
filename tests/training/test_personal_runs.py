"""Runs with personal parameters: what a run folder keeps of them, resume, and what leaves (docs/personal.md)."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedblur
from fedblur.core.errors import ConfigError, DataError, PrivacyError, RunError, TimeIsUp
from fedblur.data.population import Federation, Samples
from fedblur.training.round import run_round
from fedblur.training.run_folder import RunFolder
from fedblur.training.setup import prepare
from tests.learning.test_personal import Net
from tests.worlds import packed

LOCAL = fedblur.LocalTraining(steps=4, batch_size=4, learning_rate=0.2)
SIZES = [5, 20, 3, 17, 9, 1, 30, 8] * 3


def federation() -> Federation:
    people = packed(SIZES, (6,), 3)
    return Federation("own", people, None, 0, Samples(people.x[:20], people.y[:20]), public=True)


def config(**changes: object) -> fedblur.Config:
    settings = {
        "seed": 0, "rounds": 7, "sample_rate": 0.4, "epsilon": 8.0, "personal": ("head.*",), "local": LOCAL,
        "checkpoint_every": 2, "eval_every": 3,
    }  # fmt: skip
    return fedblur.Config(**settings | changes)


def run_of(folder: Path, settings: fedblur.Config | None = None, **options: object) -> fedblur.Run:
    return fedblur.train(settings or config(), out=folder, federation=federation(), module=Net(), **options)


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_run__keeps_personal_parameters_out_of_all_that_is_released(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    assert run.record.parameters == 35
    assert list(load_file(run.path / "model.safetensors")) == ["body.bias", "body.weight"]
    header = (run.path / "model.safetensors").read_bytes()[:400]
    assert b"head.weight" in header  # named as personal, without its values
    for path in (run.path / "checkpoints").iterdir():
        tensors = load_file(path)
        assert {name: len(tensor) for name, tensor in tensors.items()} == {"theta": 35, "personal.first": 18}
        assert torch.equal(tensors["personal.first"][:15].view(3, 5), Net().head.weight)
    first = Net()
    assert torch.equal(run.module.head.weight, first.head.weight)
    assert not torch.equal(run.module.body.weight, first.body.weight)


def test_run__gives_each_client_its_own_model(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    models = [run.personal(client) for client in range(len(SIZES))]
    assert all(torch.equal(model.body.weight, run.module.body.weight) for model in models)
    heads = torch.stack([model.head.weight.detach().flatten() for model in models])
    trained = (heads != run.module.head.weight.flatten()).any(1)
    assert int(trained.sum()) > 15
    assert len(heads[trained].unique(dim=0)) == int(trained.sum())
    with pytest.raises(ConfigError, match=r"client=24 must be one of 0\.\.23"):
        run.personal(24)
    plain = run_of(tmp_path / "plain", config(personal=()))
    assert not (plain.path / "personal").exists()
    with pytest.raises(RunError, match="keeps no personal parameters"):
        plain.personal(0)


def test_resume__goes_on_bit_identically_with_the_rows_of_its_checkpoint(tmp_path: Path) -> None:
    """Stopped where the rows are ahead of the checkpoint, and with a damaged newest checkpoint."""
    whole = run_of(tmp_path / "whole")
    for last in (3, 4, 5):
        folder = tmp_path / str(last)

        def stop(row, last=last):
            if row["round"] == last:
                raise RuntimeError("killed")  # which saves nothing, as SIGKILL

        with pytest.raises(RuntimeError):
            run_of(folder, watch=stop)
        if last == 5:
            (folder / "checkpoints" / "round-000004.safetensors").write_bytes(b"damaged")
        fedblur.resume(folder, federation=federation(), module=Net(), tell=lambda line: None)
        assert (folder / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()
        assert (folder / "personal/rows.bin").read_bytes() == (whole.path / "personal/rows.bin").read_bytes()


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, TimeIsUp])
def test_interrupt__in_the_middle_of_a_round_saves_the_rows_of_the_round_before(
    stopped: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_of(tmp_path / "whole")
    from fedblur.privacy.ledger import Ledger

    real, rounds = Ledger.spend, []

    def spend(self, round_, event, replay):  # the cohort's rows are trained, the round is not over
        rounds.append(round_)
        if len(rounds) == 6:
            raise stopped
        return real(self, round_, event, replay)

    monkeypatch.setattr(Ledger, "spend", spend)
    with pytest.raises(stopped):
        run_of(tmp_path / "run")
    monkeypatch.undo()
    fedblur.resume(tmp_path / "run", federation=federation(), module=Net(), tell=lambda line: None)
    for name in ("model.safetensors", "personal/rows.bin"):
        assert (tmp_path / "run" / name).read_bytes() == (whole.path / name).read_bytes()


def test_resume__keeps_the_first_row_of_a_model_that_is_made_again(tmp_path: Path) -> None:
    """Without a seed a named model has other initial weights in each process; clients go on from the first ones."""
    settings = fedblur.Config(
        model="mlp", personal=("*.bias",), rounds=4, clients=40, sample_rate=0.2, checkpoint_every=1, local=LOCAL,
        dataset="synthetic",
    )  # fmt: skip

    def stop(row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedblur.train(settings, out=tmp_path / "run", watch=stop)
    first = load_file(tmp_path / "run/checkpoints/round-000002.safetensors")["personal.first"]
    run = fedblur.resume(tmp_path / "run", tell=lambda line: None)
    biases = [tensor.detach().flatten() for name, tensor in run.module.named_parameters() if name.endswith("bias")]
    assert torch.equal(torch.cat(biases), first)


def test_resume__refuses_rows_that_are_gone_or_of_another_run(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", config(rounds=2))
    shutil.rmtree(run.path / "personal")
    with pytest.raises(RunError, match=r"rows\.json is missing; restore the folder personal/"):
        fedblur.resume(run.path, federation=federation(), module=Net())
    other = run_of(tmp_path / "other", config(rounds=2, personal=("head.bias",)))
    shutil.copytree(other.path / "personal", run.path / "personal")
    with pytest.raises(RunError, match="is of other personal parameters"):
        fedblur.resume(run.path, federation=federation(), module=Net())


def test_engines__give_the_same_run(tmp_path: Path) -> None:
    runs = [
        run_of(tmp_path / engine, config(method="fedrep", local=fedblur.LocalTraining(steps=6, batch_size=4)),
               machine=fedblur.Machine(device="cpu", engine=engine))
        for engine in ("vectorised", "sequential")
    ]  # fmt: skip
    for client in (0, 6, 23):
        a, b = (dict(run.personal(client).named_parameters()) for run in runs)
        assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)


def test_round__a_message_is_a_function_of_the_client_s_own_row_alone(tmp_path: Path) -> None:
    """The argument of docs/personal.md: removing one client for all rounds moves each round's sum by its message alone.

    Its row persists, but nobody else's training reads it, so everyone else's messages and rows are the same bits.
    """
    settings = config(epsilon=float("inf"), clip_norm=0.5, sampling="full", sample_rate=1.0, method="blur+lus")
    sums: list[list[torch.Tensor]] = []
    rows = []
    for size in (SIZES[-1], 0):  # the last client with its samples, and without any
        setup = prepare(settings, tmp_path / f"{size}.jsonl", fedblur.Machine(device="cpu"), federation(), Net())
        state, seen = setup.protocol.server.init(setup.initial), []
        engine = setup.engine
        engine.population.sizes[-1] = size
        mapped = engine.map_clients
        start = state

        def listening(job, ids, rng, seen=seen, mapped=mapped):
            for block in mapped(job, ids, rng):
                seen.append(block.bounded.value.clone())
                yield block

        engine.map_clients = listening
        for round_ in range(1, 4):  # the released model is the same in both worlds: what is compared is one client
            begun = len(seen)
            result = run_round(setup.protocol, start, setup.rng.child("round", round_))
            seen[begun:] = [torch.cat(seen[begun:])]
            start = type(state)(state.theta, result.state.buffers, round_)
        sums.append(seen)
        rows.append(setup.protocol.rows.read(torch.arange(len(SIZES) - 1)))
    assert torch.equal(*rows)
    for with_it, without in zip(*sums, strict=True):
        same = {row.numpy().tobytes() for row in without} & {row.numpy().tobytes() for row in with_it}
        assert len(same) >= len(SIZES) - 1
        moved = with_it.double().sum(0) - without.double().sum(0)
        assert float(moved.norm()) <= 0.5


def test_summary__and_rounds_hold_nothing_personal(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    assert json.loads((run.path / "config.json").read_text())["personal"] == ["head.*"]
    text = (run.path / "summary.json").read_text() + (run.path / "ledger.jsonl").read_text()
    assert "head.weight" not in text
    assert not [name for name in files(run.path) if "personal" in name and name.split("/")[0] != "personal"]


@dataclass(frozen=True)
class Remembering(fedblur.Method):
    """A method that remembers something and does nothing with it."""

    part_name = "remembering"

    def client_state(self, layout):
        return {"rounds": (1,)}

    def next_state(self, state, delta, clip_norm):
        return {"rounds": state["rounds"] + 1}


def test_sampling__of_fixed_size_is_refused(tmp_path: Path) -> None:
    """That one came means that another did not: what others remember would hint at the rounds of a client."""
    fixed = config(sampling="fixed", accountant="rdp")
    with pytest.raises(PrivacyError, match='use sampling = "poisson"'):
        run_of(tmp_path / "run", fixed)
    assert not (tmp_path / "run").exists()
    object.__setattr__(fixed, "method", (Remembering(),))
    object.__setattr__(fixed, "personal", ())
    with pytest.raises(PrivacyError, match="hint at who took part"):
        prepare(fixed, tmp_path / "ledger.jsonl", fedblur.Machine(device="cpu"), federation(), Net())
    run_of(tmp_path / "all", config(sampling="full", sample_rate=1.0, rounds=1))
    run_of(tmp_path / "everyone", config(sampling="fixed", accountant="rdp", sample_rate=1.0, rounds=1))


def test_refused__where_it_makes_no_sense(tmp_path: Path) -> None:
    for settings, words in (
        (config(personal=("haed.*",)), "did you mean 'head"),
        (config(personal=("*",)), "nothing is left"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_of(tmp_path / "run", settings)
        assert not (tmp_path / "run").exists()


# --- clients' own models, measured ---


def owned(people: object = None, **options: object) -> Federation:
    """Clients who have a quarter as many held-out samples as training samples; some test samples are nobody's."""
    whole = packed([size + size // 4 for size in SIZES], (6,), 3)
    place = torch.cat([torch.arange(size + size // 4) for size in SIZES])
    who = torch.repeat_interleave(torch.arange(len(SIZES)), whole.sizes)
    held = place >= torch.tensor(SIZES)[who]
    owners = torch.cat([who[held], torch.tensor([-1, -1])])
    extra = whole.x[:2], whole.y[:2]
    return fedblur.federation_from_arrays(
        whole.x[~held], whole.y[~held], who[~held], torch.cat([whole.x[held], extra[0]]),
        torch.cat([whole.y[held], extra[1]]), classes=3, public=True, test_owners=owners, **options,
    )  # fmt: skip


def by_hand(run: fedblur.Run, data: Federation) -> float:
    """Each client's own model on its own held-out samples, one by one."""
    hits = total = 0
    for client in range(data.train.clients):
        mine = data.test_owners == client
        if mine.any():
            with torch.no_grad():
                hits += int((run.personal(client)(data.test.x[mine]).argmax(1) == data.test.y[mine]).sum())
            total += int(mine.sum())
    return hits / total


@pytest.mark.parametrize("engine", ["vectorised", "sequential"])
def test_personal_figures__are_of_each_client_s_own_model_on_its_own_samples(engine: str, tmp_path: Path) -> None:
    data, machine = owned(), fedblur.Machine(device="cpu", engine=engine)
    settings = config(rounds=12, local=fedblur.LocalTraining(steps=20, batch_size=8, learning_rate=0.3))
    run = fedblur.train(settings, out=tmp_path / "run", federation=data, module=Net(), machine=machine)
    assert run.personal_figures["accuracy"] == by_hand(run, data)
    assert run.personal_figures["accuracy"] > run.accuracy + 0.1  # which is that of a new client
    assert run.rounds[-1]["local_only"]["personal_accuracy"] == run.personal_figures["accuracy"]
    assert set(run.personal_figures) == {"accuracy", "loss"}


def test_personal_figures__leave_nothing_in_what_is_released(tmp_path: Path) -> None:
    """The ledger's closing line, statement and summary are the same, whatever clients' own models reach."""
    settings = config(
        metrics=("accuracy", "f1"), local=fedblur.LocalTraining(steps=20, batch_size=8, learning_rate=0.3)
    )
    with_owners, data = owned(), owned()
    object.__setattr__(data, "test_owners", None)
    runs = [
        fedblur.train(settings, out=tmp_path / name, federation=each, module=Net())
        for name, each in (("with", with_owners), ("without", data))
    ]
    assert runs[0].personal_figures
    assert not runs[1].personal_figures
    released = [RunFolder(run.path).released() for run in runs]  # what the ledger's closing line stands for
    assert (released[0]["model"], released[0]["rounds"]) == (released[1]["model"], released[1]["rounds"])
    summaries = [run.summary | {"local_only": None, "seconds": None} for run in runs]
    for summary in summaries:
        summary["privacy"]["ledger"] = None  # which has the time in it
    assert summaries[0] == summaries[1]
    assert "personal_accuracy" not in (runs[0].path / "statement.md").read_text()
    rows = [json.loads(line) for line in (runs[0].path / "rounds.jsonl").read_text().splitlines()]
    assert all("personal_accuracy" not in row | (row.get("figures") or {}) for row in rows)


def test_personal_steps__personalise_before_measuring_and_keep_nothing(tmp_path: Path) -> None:
    """Clients who were never sampled have a useful model too; rows, model and ledger are those of a run without."""
    data, local = owned(), fedblur.LocalTraining(steps=5, batch_size=8, learning_rate=0.3)
    settings = [config(rounds=2, sample_rate=0.1, local=local, personal_steps=steps) for steps in (0, 30)]
    runs = [
        fedblur.train(each, out=tmp_path / str(each.personal_steps), federation=data, module=Net(),
                      machine=fedblur.Machine(device="cpu", engine=engine))
        for each, engine in zip([*settings, settings[1]], ["vectorised", "vectorised", "sequential"], strict=False)
        if not (tmp_path / str(each.personal_steps)).exists()
    ]  # fmt: skip
    plain, tuned = runs
    assert tuned.personal_figures["accuracy"] > plain.personal_figures["accuracy"] + 0.1
    for name in ("model.safetensors", "personal/rows.bin"):
        assert (plain.path / name).read_bytes() == (tuned.path / name).read_bytes()
    again = fedblur.train(settings[1], out=tmp_path / "again", federation=data, module=Net(),
                          machine=fedblur.Machine(device="cpu", engine="sequential"))  # fmt: skip
    assert again.personal_figures["loss"] == pytest.approx(tuned.personal_figures["loss"], abs=1e-4)


def test_test_owners__are_checked_and_follow_their_client_s_role() -> None:
    data = owned()
    assert int(data.test_owners.max()) == len(SIZES) - 1
    assert data.note == "test samples are held out of clients' own"
    divided = owned(validation_share=0.3)
    assert int(divided.test_owners.max()) < divided.train.clients < len(SIZES)
    assert int((divided.test_owners < 0).sum()) > 2  # those of validation clients
    x, y, who = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    for owners, words in (([0], "4 test samples but 1 test_owners"), ([0, 1, 2, 0], r"must be clients 0\.\.1")):
        with pytest.raises(DataError, match=words):
            fedblur.federation_from_arrays(x, y, who, x, y, classes=2, test_owners=torch.tensor(owners))
