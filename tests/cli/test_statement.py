"""The privacy statement: everything that a reviewer asks, in three forms that agree."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedblur.privacy import accounting
from fedblur.privacy.accounting import ZERO_OUT, zcdp
from fedblur.privacy.events import Composed, DistributedDiscreteGaussian, Gaussian, PoissonSampled, SelfComposed
from fedblur.report.statement import delta_against, meaning, not_protected
from fedblur.report.text import in_short, rounded_up
from tests.commandline import invoke


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statement") / "run"
    shown = invoke("run", "--rounds", 5, "--clients", 50, "--quiet", "--out", path, "--sample-rate", 0.2)
    assert f"Statement: {path}/statement.md (.html, .json)" in shown
    return path


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_statement__has_all_that_the_reporting_guidance_asks_for(run: Path) -> None:
    text = (run / "statement.md").read_text()
    for words in (
        "unit of privacy", "neighbours", "add or remove one client", "trusted", "mechanism", "sampling", "ε by PLD",
        "ε by RDP", "zCDP", "δ·N", "releases", "Tuning", "Assumed", "Not protected", "randomness", "versions",
        "configuration", "ledger", "pN = 10", "operating system (CSPRNG)", "verified: chain whole",
    ):  # fmt: skip
        assert words in text, words
    assert "not private" not in text.lower()
    assert "It has (ε, δ)-differential privacy" in text
    assert "FAILS FOR THIS RUN" not in text


def test_statement__the_json_form_is_recomputed_from_the_ledger(run: Path) -> None:
    facts = json.loads((run / "statement.json").read_text())
    event = PoissonSampled(0.2, Gaussian(facts["claim"]["noise_multiplier"]))
    for name in ("pld", "rdp"):
        assert facts["epsilon"][name] == accounting.epsilon(event, 5, 1 / 50, name)
    assert facts["private"] is True
    assert facts["releases"] == 5
    assert facts["delta_times_clients"] == pytest.approx(1)
    assert facts["ledger"]["lines"] == 7  # the budget, five releases, the closing line
    assert facts["ledger"]["head"] in (run / "ledger.jsonl").read_text()
    assert facts["ledger_findings"] == []
    assert "local_only" not in facts


def test_statement__the_html_needs_nothing_else_and_knows_dark_rooms(run: Path) -> None:
    page = (run / "statement.html").read_text()
    opened: list[str] = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag != "meta":
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Balance().feed(page)
    assert opened == []
    assert "prefers-color-scheme: dark" in page
    assert "http" not in page
    assert "<script" not in page


def test_statement__a_seeded_run_says_plainly_that_it_is_not_private(tmp_path: Path) -> None:
    shown = invoke("run", "--rounds", 2, "--clients", 30, "--seed", 1, "--quiet", "--out", tmp_path / "run")
    assert "NOT PRIVATE: SEEDED NOISE" in shown
    assert "This run is not private: seeded noise." in (tmp_path / "run" / "statement.md").read_text()
    facts = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert facts["private"] is False
    assert facts["not_private_because"] == "not private: seeded noise"
    text = (tmp_path / "run" / "statement.md").read_text()
    assert "## What is not claimed for this run" in text
    assert "it would have had (ε, δ)-differential privacy" in text
    assert sum("FAILS FOR THIS RUN" in line for line in facts["assumed"]) == 1


def test_statement__without_noise_says_so(tmp_path: Path) -> None:
    shown = invoke("run", "--rounds", 2, "--clients", 30, "--epsilon", "inf", "--quiet", "--out", tmp_path / "run")
    assert "NOT PRIVATE: NO NOISE" in shown
    assert "∞" in (tmp_path / "run" / "statement.md").read_text()


def test_statement__other_runs_on_the_same_clients_enter_the_total(copy: Path, run: Path) -> None:
    invoke("statement", copy, "--also", run, "--tuning", "two learning rates, on validation clients")
    text, facts = (copy / "statement.md").read_text(), json.loads((copy / "statement.json").read_text())
    assert "all 2 runs together" in text
    assert "two learning rates, on validation clients" in text
    assert facts["total"]["epsilon"]["pld"] > facts["epsilon"]["pld"]


def test_statement__an_edited_ledger_is_not_stated(copy: Path) -> None:
    path = copy / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"round": 3', b'"round": 2'))
    assert "does not follow" in invoke("statement", copy, status=2)


def test_statement__a_cut_ledger_is_stated_as_not_verified(copy: Path) -> None:
    path = copy / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert "LEDGER NOT VERIFIED" in invoke("statement", copy)
    assert "could not be verified" in (copy / "statement.md").read_text()


def test_statement__voting_runs_have_one_too(tmp_path: Path) -> None:
    words = ("run", "--method", "knn-dpfl", "--clients", 60, "--quiet", "--out", tmp_path / "run")
    invoke(*words, "--set", "method.knn-dpfl.student_steps=20")
    text = (tmp_path / "run" / "statement.md").read_text()
    assert "noisy plurality" in text
    assert "ρ = " in text  # everyone votes: zCDP applies
    assert "verified, 1 releases" in invoke("ledger", "verify", tmp_path / "run")


def test_statement__an_unfinished_run_is_one_line(copy: Path) -> None:
    (copy / "summary.json").unlink()
    assert "the run never ended" in invoke("statement", copy, status=2)


def test_zcdp__adds_up_without_sampling_and_is_refused_with_it() -> None:
    assert zcdp(SelfComposed(Gaussian(2.0), 8)) == pytest.approx(1.0)
    assert zcdp(Composed((Gaussian(1.0), PoissonSampled(1.0, Gaussian(2.0))))) == pytest.approx(0.625)
    assert zcdp(PoissonSampled(0.5, Gaussian(2.0))) is None
    assert zcdp(DistributedDiscreteGaussian(10.0, 5.0, 32, 1, "tight")) == pytest.approx(0.125)
    assert zcdp(Gaussian(0.0)) == float("inf")
    assert zcdp(None) == 0


@pytest.mark.parametrize("epsilon", [0.0001, 0.9994, 1.0001, 1.00049, 2.2501, 7.9999, 2.0000000001])
def test_statement__epsilon_is_rounded_up_never_to_nearest(epsilon: float) -> None:
    """A reader is promised what is printed: 1.0001 is 1.001 in a statement."""
    printed = rounded_up(epsilon)
    assert 0 <= float(printed) - epsilon < 0.001
    assert f"with ε = {printed} and" in meaning(epsilon, 1e-5, False, "add or remove one client")
    assert (in_short(2.004), in_short(1.9951), in_short(2.00001, 4)) == ("2.01", "2", "2.001")
    assert (rounded_up(2.0), rounded_up(None), rounded_up(float("inf"))) == ("2.000", "no bound", "∞")


def test_words__say_what_delta_and_epsilon_permit() -> None:
    assert "publishing one client's data in full" in delta_against(1 / 400, 400)
    assert "Not far below" in delta_against(0.5 / 400, 400)
    assert "Well below" in delta_against(0.01 / 400, 400)
    joins = "add or remove one client"
    assert "a client's taking part was an even bet may become 88 % sure" in meaning(
        2.0, 1e-5, False, joins
    )  # e²/(1 + e²)
    assert "nothing is claimed" in meaning(float("inf"), 1e-5, False, joins)
    assert "P[E with one client's data] ≤ e^ε · P[E with another's instead]" in meaning(
        2.0, 1e-5, False, "replace one client"
    )
    assert "P[E with a client's data] ≤ e^ε · P[E with none in their place]" in meaning(2.0, 1e-5, False, ZERO_OUT)
    assert "floating point" in " ".join(not_protected(in_floats=True))
    assert "floating point" not in " ".join(not_protected(in_floats=False))


FEW_STEPS = ["--set", "method.ae-dpfl.teacher_steps=5", "--set", "method.ae-dpfl.student_steps=10"]
DISCRETE = ["--set", "mechanism.name=ddgauss", "--set", "mechanism.mode=exact", "--set", "mechanism.bits=20"]


@pytest.mark.parametrize(
    ("flags", "said", "unsaid"),
    [
        (["--set", "sampling=fixed", "--set", "accountant=rdp"], ["with another's instead", "are drawn at random"],
         ["taking part", "independent draws"]),
        ([*DISCRETE, "--set", "mechanism.min_cohort=2", "--set", "accountant=rdp"],
         ["with none in their place", "σ·S on the sum of 2 clients, and √(n/2) times that", "amplifies nothing"],
         ["taking part", "independent draws"]),
        (["--set", "clipping=adaptive"], ["times the round's S on the sum", "clipped to at most the round's S, which "
         "started at 0.1, has come to"], ["standard deviation σ·S"]),
        (["--method", "ae-dpfl", *FEW_STEPS], ["1 release of labels by noisy votes", "on every count of votes, ",
         "Whoever the public pool belongs to"], ["noisy sums", "independent draws", "a round that would"]),
        ([], ["a client's taking part was an even bet", "independent draws", "deviation σ·S on the sum, on all"],
         ["public pool", "validation clients"]),
    ],
    ids=["fixed", "min-cohort", "adaptive", "votes", "plain"],
)  # fmt: skip
def test_statement__says_what_is_true_of_this_very_run(
    flags: list[str], said: list[str], unsaid: list[str], tmp_path: Path
) -> None:
    invoke("run", "--rounds", 2, "--clients", 60, "--sample-rate", 0.2, "--quiet", "--out", tmp_path / "run", *flags)
    text = (tmp_path / "run" / "statement.md").read_text()
    assert [words for words in said if words not in text] == []
    assert [words for words in unsaid if words in text] == []
