"""The engine by itself: timed once, kept, said, recorded in the run folder, and the user's word comes first."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fedblur
from fedblur.data.population import Federation, Samples
from fedblur.engines import Choice, timing
from fedblur.engines.choice import choose_engine, rule
from fedblur.engines.cohort_sum import Wanted
from fedblur.engines.distributed import Ranks
from fedblur.engines.isolation_check import cannot_map
from fedblur.engines.local import LocalEngine
from fedblur.engines.timing import Work, timed_choice
from fedblur.learning.methods import Method
from fedblur.learning.methods.base import ClipNorm
from fedblur.learning.module_function import Params
from fedblur.privacy.accounting import make_plan
from fedblur.privacy.mechanisms.gaussian import Gaussian
from fedblur.privacy.sampling import FullSampler
from fedblur.training.machine import Machine
from fedblur.training.resume import resume
from tests.worlds import CPU, SmallCnn, job_for, packed

SHORT = fedblur.Config(rounds=4, seed=0, checkpoint_every=2, epsilon=4.0)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Timings on, every run worth one, nothing known."""
    monkeypatch.delenv("FEDBLUR_TIMING")
    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "_FEWEST", 0)
    monkeypatch.setattr(timing, "_WORTH", 0.0)
    monkeypatch.setattr(timing, "_CLIENTS", 4)
    return tmp_path / "cache"


def work(module: nn.Module, rounds: int = 100) -> Work:
    return Work(job_for(module), module, packed([1]).samples(), 10, 8.0, rounds)


def stub(monkeypatch: pytest.MonkeyPatch, vectorised: float, sequential: float) -> list[str]:
    """Clocks that say what they are told; the engines still run nowhere else than here."""
    asked: list[str] = []

    def seconds(work: Work, device: torch.device, kind: str, clients: int) -> float:
        asked.append(kind)
        return vectorised if kind == "vectorised" else sequential

    monkeypatch.setattr(timing, "_seconds", seconds)
    return asked


def test_choice__is_measured_once_and_cached(timed: Path) -> None:
    first, second = (timed_choice(work(SmallCnn()), CPU) for _ in range(2))
    assert first.why.endswith("times as long, measured")
    assert second == Choice(first.kind, first.why.replace("measured", "cached"))
    assert len(list(timed.glob("engine-*.json"))) == 1


def test_choice__another_model_or_batch_is_timed_anew(timed: Path) -> None:
    timed_choice(work(SmallCnn()), CPU)
    timed_choice(work(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), CPU)
    assert len(list(timed.glob("engine-*.json"))) == 2


@pytest.mark.parametrize(
    ("vectorised", "sequential", "kind"),
    [(1.0, 3.0, "vectorised"), (3.0, 1.0, "sequential"), (1.0, 1.05, "sequential"), (1.05, 1.0, "sequential")],
)
def test_choice__the_faster_one_wins_and_near_ties_go_to_the_rule(timed, monkeypatch, vectorised, sequential, kind):
    stub(monkeypatch, vectorised, sequential)
    assert rule(SmallCnn(), CPU) == "sequential"
    assert timed_choice(work(SmallCnn()), CPU).kind == kind


def test_choice__a_short_run_is_left_to_the_rule(timed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stub(monkeypatch, 1e-4, 1e-4)
    monkeypatch.setattr(timing, "_WORTH", 10.0)
    assert timed_choice(work(SmallCnn()), CPU) == Choice("sequential", "by rule, the run is too short to time it")
    assert asked == ["sequential"]  # one step, to see how long the run will take
    monkeypatch.setattr(timing, "_FEWEST", 10_000)
    timed_choice(work(SmallCnn()), CPU)
    assert len(asked) == 1  # not even that
    assert not timed.exists()


def test_choice__a_spoilt_cache_is_measured_again(timed: Path) -> None:
    timed_choice(work(SmallCnn()), CPU)
    (path,) = timed.glob("engine-*.json")
    path.write_text('{"engine": "warp')
    with pytest.warns(UserWarning, match="its content is not what was written"):
        assert timed_choice(work(SmallCnn()), CPU).why.endswith("measured")


class Branches(SmallCnn):
    """A branch on data, which vmap refuses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if bool(self.head.weight.sum() < 1e9) else x


def test_choice__a_model_that_vmap_refuses_goes_one_by_one(timed: Path) -> None:
    assert timed_choice(work(Branches()), CPU).kind == "sequential"
    assert "vectorised cannot run this model" in timed_choice(work(Branches()), CPU).why


@dataclass(frozen=True)
class Branching(Method):
    """A hook that branches on data, against the contract of methods."""

    def gradient_term(self, delta: Params, clip_norm: ClipNorm) -> Params | None:
        return delta if bool(next(iter(delta.values())).norm() > clip_norm) else None


class Dense(nn.Sequential):
    """A model that the rule would train under vmap."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


def test_choice__a_hook_that_vmap_refuses_is_an_error_at_its_line_and_not_the_models_fault(timed: Path) -> None:
    own = replace(work(Dense()), job=replace(job_for(Dense()), methods=(Branching(),)))
    assert not cannot_map(own.job, own.like, own.classes, CPU)
    with pytest.raises(RuntimeError, match="data-dependent control flow") as caught:
        timed_choice(own, CPU)
    assert "gradient_term" in [one.name for one in caught.traceback]
    assert not list(timed.glob("engine-*.json"))


def test_choice__a_models_own_error_is_no_refusal_of_vmap(timed: Path) -> None:
    class Broken(Dense):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[..., :5])

    own = work(Broken())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        cannot_map(own.job, own.like, own.classes, CPU)


def test_choice__other_ranks_take_rank_0s_and_time_nothing(timed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(Ranks):
        def tell(self, message: Choice | None = None) -> Choice:
            assert message is None
            return Choice("vectorised", "as rank 0 found")

        def _demand_alike(self, clients: int, parameters: int, constants: str) -> None:
            assert (clients, parameters, constants) == (3, wanted.work.job.layout.total, "")

    asked = stub(monkeypatch, 9.0, 1.0)
    clients = packed([5, 6, 7])
    data = Federation("made up", clients, None, 0, Samples(clients.x, clients.y))
    plan = make_plan(FullSampler(3), Gaussian(), rounds=1, delta=1e-2, noise_multiplier=1.0)
    wanted = Wanted(work(SmallCnn()), data, plan, CPU, "fp32", private=False)
    source = Told(1, 2, CPU, 1.0).connect(wanted)
    assert source.choice == Choice("vectorised", "as rank 0 found")
    assert source.machine.endswith("(as rank 0 found), fp32, 2 processes")
    assert not asked


def test_run__says_and_records_its_engine(timed: Path, tmp_path: Path) -> None:
    heard: list[str] = []
    run = fedblur.train(SHORT, out=tmp_path / "run", tell=heard.append)
    record = json.loads((run.path / "engine.json").read_text())
    assert record["device"] == "cpu"
    assert heard == [f"engine: {record['machine']}; --engine names another"]
    assert "times as long, measured" in heard[0]
    assert run.summary["machine"] == record["machine"]


def test_resume__takes_the_recorded_engine_and_ends_with_the_same_bytes(timed, tmp_path, monkeypatch) -> None:
    def stop(row: dict[str, object]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    stub(monkeypatch, vectorised=9.0, sequential=1.0)  # not what the rule says for logistic regression
    whole = fedblur.train(SHORT, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedblur.train(SHORT, out=tmp_path / "cut", watch=stop)
    assert json.loads((tmp_path / "cut/engine.json").read_text())["engine"] == "sequential"
    stub(monkeypatch, vectorised=1.0, sequential=9.0)  # the machine has changed its mind
    for path in timed.glob("engine-*.json"):
        path.unlink()
    heard: list[str] = []
    run = resume(tmp_path / "cut", tell=heard.append)
    assert heard[-1].startswith("engine: sequential")
    assert (run.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()


def test_resume__the_users_word_comes_first(tmp_path: Path) -> None:
    run = fedblur.train(SHORT, out=tmp_path / "run", machine=Machine(engine="vectorised"))
    max((run.path / "checkpoints").iterdir()).unlink()
    heard: list[str] = []
    resume(tmp_path / "run", machine=Machine(engine="sequential"), tell=heard.append)
    assert heard[-1].startswith("engine: sequential")


def test_resume__a_spoilt_record_is_one_line(tmp_path: Path) -> None:
    run = fedblur.train(SHORT, out=tmp_path / "run")
    (run.path / "engine.json").write_text("{")
    with pytest.raises(fedblur.FedBlurError, match=r"engine\.json cannot be read: .*delete it"):
        resume(run.path)


@pytest.mark.parametrize(("steps", "how"), [(0, "plain"), (1999, "plain"), (2000, "compiled")])
def test_choice__on_a_gpu_long_runs_are_compiled(steps: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**37))
    population = packed([4] * 3)
    monkeypatch.setattr(type(population), "to", lambda self, device: self)
    engine = choose_engine(population, nn.Linear(4, 2), 10, torch.device("cuda"), "vectorised", steps, cohort=100.0)
    assert isinstance(engine, LocalEngine)
    assert engine.how == how
    assert engine.block_size == 8  # four clients, and four empty ones


@pytest.mark.parametrize(("device", "block"), [("cuda", 32), ("cpu", 2)])
def test_choice__a_busy_gpu_does_not_make_blocks_small(timed: Path, monkeypatch, device: str, block: int) -> None:
    """A timing beside other work once gave ResNet-18's blocks so few clients that one after another won."""
    asked: dict[str, list[int]] = {"sequential": [], "vectorised": []}

    def seconds(work: Work, device: torch.device, kind: str, clients: int) -> float:
        asked[kind].append(clients)
        return 0.3

    monkeypatch.setattr(timing, "_seconds", seconds)
    monkeypatch.setattr(timing, "_machine", lambda device: "busy")
    monkeypatch.setattr(timing, "_CLIENTS", 32)
    many = replace(work(SmallCnn()), cohort=300.0)
    timed_choice(many, torch.device(device))
    assert asked == {"sequential": [1, 2], "vectorised": [block]}
