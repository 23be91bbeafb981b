"""The gate itself: the list fits the code, and each way to be wrong is found on a toy package."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.run import PACKAGE, ROOT, Mutant, chosen, main, part_of_commit, read_list

MUTANTS = read_list()


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if not mutant.needs], ids=lambda mutant: mutant.name)
def test_mutant__quotes_the_code_exactly_once_and_names_a_test_that_is_there(mutant: Mutant) -> None:
    """Whoever edits a line that a mutant quotes learns it here, and not in the gate."""
    text = (ROOT / PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert mutant.planted(text) != text
    file, _, name = mutant.test.partition("[")[0].partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    (test,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    marks = {ast.unparse(mark) for mark in test.decorator_list}
    assert "pytest.mark.long" not in marks, "make test-long runs it, and the gate does not"


def test_list__covers_the_files_that_privacy_rests_on() -> None:
    files = Counter(mutant.file.rpartition("/")[2] for mutant in MUTANTS)
    assert len(MUTANTS) >= 100
    assert {
        "clipping.py", "rounded_gaussian.py", "gaussian.py", "rng.py",
        "noise_matrices.py", "noise_recursion.py", "noise_key.py",
        "round.py", "sampling.py", "accounting.py", "accountants.py", "planning.py", "events.py", "ledger.py",
        "verify_ledger.py", "adaptive_clipping.py", "public_mask.py", "private_selection.py",
        "search_runner.py",
        "release.py", "secure_sum.py", "discrete_sampler.py", "ddgauss.py", "skellam.py",
        "text.py", "statement.py", "secure_sum_client.py",
    } <= set(files)  # fmt: skip


def test_parts__are_all_of_the_list_and_each_once() -> None:
    tenths = [chosen(MUTANTS, [], f"{k}/10") for k in range(1, 11)]
    assert sorted(mutant.name for part in tenths for mutant in part) == sorted(mutant.name for mutant in MUTANTS)
    assert max(map(len, tenths)) - min(map(len, tenths)) <= 1


def test_part__of_a_commit_is_its_hash_modulo_10(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        setting = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *setting, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    part = part_of_commit(tmp_path)
    assert part == int(git("rev-parse", "HEAD"), 16) % 10 + 1
    assert chosen(MUTANTS, [], "commit", tmp_path) == chosen(MUTANTS, [], f"{part}/10")


@pytest.mark.parametrize("arguments", [["--part", "0/10"], ["--part", "11/10"], ["--part", "x"], ["--only", "nothing"]])
def test_options__nonsense_is_refused(arguments: list[str]) -> None:
    assert main(arguments) == 2


# --- a toy package, and mutants that go wrong in every way ---

CODE = """
LIMIT = 3

class OwnError(Exception):
    pass

def clip(x):
    if x != x:
        raise OwnError
    return min(x, LIMIT)
"""
TESTS = """
import os, subprocess, sys
import pytest
from fedblur.toy import clip, OwnError

def test_clip():
    assert clip(5) == 3

def test_small():
    assert clip(1) == 1

def test_elsewhere():
    code = "from fedblur.toy import clip; print(clip(5))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "3\\n"

@pytest.mark.parametrize("x", [1, 2])
def test_each(x):
    assert clip(x) == x

@pytest.mark.skip(reason="never")
def test_skipped():
    assert clip(5) == 3

def test_wrong():
    assert clip(5) == 4
"""
TOYS = {
    "killed": ("min(x, LIMIT)", "x", "test_clip"),
    "killed in a process that the test starts": ("min(x, LIMIT)", "x", "test_elsewhere"),
    "killed with parameters": ("min(x, LIMIT)", "min(x, 1)", "test_each"),
    "killed by our own error": ("if x != x:", "if x == x:", "test_clip"),
    "survives": ("LIMIT = 3", "LIMIT = 4", "test_small"),
    "does not import": ("LIMIT = 3", "LIMIT = nothing", "test_clip"),
    "is no Python": ("LIMIT = 3", "LIMIT = (", "test_clip"),
    "only breaks": ("min(x, LIMIT)", "min(x, LIMITS)", "test_clip"),
    "is not there": ("LIMIT = 9", "LIMIT = 4", "test_clip"),
    "is there twice": ("LIMIT", "SIZE", "test_clip"),
    "skips": ("LIMIT = 3", "LIMIT = 4", "test_skipped"),
    "names a test that fails": ("LIMIT = 3", "LIMIT = 4", "test_wrong"),
    "waits": ("LIMIT = 9", "LIMIT = 4", "test_clip"),
}


def toy(folder: Path, *names: str) -> list[Mutant]:
    """A repository of one file, one file of tests, and these mutants."""
    for path, text in (("src/fedblur/__init__.py", ""), ("src/fedblur/toy.py", CODE), ("tests/test_toy.py", TESTS)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    tests = "tests/test_toy.py::"
    return [
        Mutant(name, "toy.py", ((old, new),), "it is a toy", tests + test, "a branch" if name == "waits" else "")
        for name, (old, new, test) in TOYS.items()
        if name in names
    ]


def test_gate__knows_killed_from_everything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [name for name in TOYS if name.startswith("killed")]
    bad = {
        "survives": "survived", "does not import": "does not import", "is no Python": "never closed",
        "only breaks": "it broke the code: NameError", "is not there": "the pattern is not there",
        "is there twice": "the pattern is there 2 times",
    }  # fmt: skip
    wrong = run.run(toy(tmp_path, *good, *bad, "waits"), tmp_path)
    shown = capsys.readouterr().out
    assert len(wrong) == len(bad)
    for name, words in bad.items():
        assert any(line.startswith(name) and words in line for line in wrong), name
    assert all(f"killed    {name} (" in shown for name in good)
    assert "waits     waits: needs a branch" in shown
    assert (tmp_path / "src/fedblur/toy.py").read_text() == CODE
    assert not [path for path in tmp_path.rglob("*") if path.name in ("__pycache__", ".hypothesis")]


@pytest.mark.parametrize(("name", "word"), [("skips", "skipped"), ("names a test that fails", "failed")])
def test_gate__a_named_test_must_pass_without_a_mutant(tmp_path: Path, name: str, word: str) -> None:
    wrong = run.run(toy(tmp_path, name), tmp_path)
    assert any(f"{word} without a mutant" in line for line in wrong)


def test_main__ends_with_1_if_one_survives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy(tmp_path)
    lines = ["[[mutant]]", 'name = "four"', 'file = "toy.py"', 'change = [["LIMIT = 3", "LIMIT = 4"]]', 'why = "toy"']
    path = tmp_path / "list.toml"
    for test, status in (("test_small", 1), ("test_clip", 0)):
        path.write_text("\n".join([*lines, f'test = "tests/test_toy.py::{test}"']))
        assert main([], tmp_path, path) == status
    assert "1 of 1 mutants" in capsys.readouterr().out
    path.write_text("\n".join(lines))
    assert main([], tmp_path, path) == 2  # a mutant without its test
