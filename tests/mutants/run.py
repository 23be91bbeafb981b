"""The mutation gate: plant every mutant of mutants.toml into a copy of src/, and see the test that it names fail.

    python -m tests.mutants.run                  all of them (`make mutants`)
    python -m tests.mutants.run --only NAME      one, or several with several --only
    python -m tests.mutants.run --part 3/10      every tenth, from the third
    python -m tests.mutants.run --part commit    every tenth; which one, the commit's hash says (what CI runs)
    python -m tests.mutants.run --list           names, files and reasons; nothing is run

First the named tests run on the code as it is: each must pass, and a skip is no pass. A mutant counts as killed only by
an assertion or by an error type of our own. One that does not import, dies of a NameError or hangs is a bad mutant. The
exit status is 1 if a mutant survives or is bad, or if a pattern is not in its file exactly once.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")
PACKAGE = Path("src") / "fedblur"
PARTS = 10
SECONDS = 240  # for one run of pytest on a mutant: one that hangs is bad


@dataclass(frozen=True)
class Mutant:
    """A small change that would be a privacy bug, and the test that must notice it."""

    name: str
    file: str  # below src/fedblur
    change: tuple[tuple[str, str], ...]  # (text that is in the file exactly once, what replaces it)
    why: str
    test: str  # a pytest node
    needs: str = ""  # a branch that has to be merged first; until then it is passed over by name

    @classmethod
    def of(cls, table: dict[str, Any]) -> Mutant:
        """Read one entry; anything unknown, missing or empty is refused."""
        known, needed = {"name", "file", "change", "why", "test", "needs"}, {"name", "file", "change", "why", "test"}
        if set(table) - known or needed - set(table) or not all(table.values()):
            raise ValueError(f"mutant {table.get('name')!r}: it must have {sorted(needed)}, and may have needs")
        return cls(**table | {"change": tuple((old, new) for old, new in table["change"])})

    def planted(self, text: str) -> str:
        """The file's text with the change in it."""
        for old, new in self.change:
            if text.count(old) != 1:
                found = f"is there {text.count(old)} times" if old in text else "is not there"
                raise ValueError(f"{self.file}: the pattern {found}: {old!r}")
            text = text.replace(old, new)
        return text


@dataclass(frozen=True)
class Report:
    """What pytest did, by `mutant_report.py`."""

    seconds: float
    lines: list[dict[str, Any]]
    output: str
    timed_out: bool = False

    def of(self, node: str) -> list[dict[str, Any]]:
        """The lines of one test, with all of its parameters."""
        return [line for line in self.lines if node in (line.get("test"), line.get("test", "").partition("[")[0])]

    @property
    def broken_imports(self) -> list[str]:
        return [f"{line['collect']}: {line['text']}" for line in self.lines if "collect" in line]

    def imported_from(self, source: Path) -> bool:
        """Whether the package that ran is the one in `source`."""
        packages = [line["package"] for line in self.lines if "package" in line]
        return bool(packages) and packages[-1] is not None and Path(packages[-1]).is_relative_to(source)


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant."""

    mutant: Mutant
    word: str  # killed, survived, bad, waits
    note: str
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.word in ("killed", "waits")


@dataclass
class Gate:
    """Copies of a source tree, one for each process, and pytest runs in them."""

    root: Path
    work: Path  # a temporary folder: nothing is written into the working tree
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def copy(self, name: str) -> Path:
        """Copy src/. Compiled files are checked by content: two mutants can be of one size and of one second."""
        source = self.work / name
        shutil.copytree(self.root / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(source, quiet=2, invalidation_mode=mode)
        return source

    def pytest(self, source: Path, nodes: list[str], *options: str) -> Report:
        """Run these tests with this copy of the source."""
        with self._lock:
            self._count += 1
            log = self.work / f"run-{self._count}"
        path = os.pathsep.join(map(str, (source, self.root, LIST.parent)))
        settings = {
            "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "MUTANT_REPORT": f"{log}.jsonl",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.work / "hypothesis"),
        }  # fmt: skip
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        fixed = ["-q", "-p", "no:cacheprovider", "-p", "mutant_report", "--hypothesis-seed=0", f"--basetemp={log}"]
        began = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *fixed, *options, *nodes],
                cwd=self.root, env=inherited | settings, timeout=SECONDS if options else None,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            output, late = done.stdout, False
        except subprocess.TimeoutExpired:
            output, late = "", True
        lines = Path(f"{log}.jsonl").read_text(encoding="utf-8").splitlines() if Path(f"{log}.jsonl").exists() else []
        shutil.rmtree(log, ignore_errors=True)
        return Report(time.perf_counter() - began, [json.loads(line) for line in lines], output, late)

    def unmutated(self, source: Path, nodes: list[str]) -> list[str]:
        """What is wrong with the named tests on the code as it is; none of them may fail, be skipped or be missing."""
        report = self.pytest(source, nodes)
        wrong = [f"does not import: {line}" for line in report.broken_imports]
        if not wrong and not report.imported_from(source):
            return [f"the copy of the source was not what ran:\n{report.output[-2000:]}"]
        for node in nodes:
            lines = report.of(node)
            others = sorted({line["outcome"] for line in lines} - {"passed"})
            if others or not lines:
                told = next((line["text"] for line in lines if line["text"]), "")
                wrong.append(f"{node}: {' and '.join(others) or 'was not run'} without a mutant {told}".strip())
        return wrong

    def verdict(self, mutant: Mutant, source: Path) -> Verdict:
        """Plant one mutant, run its test, and take the mutant out again."""
        path = source / "fedblur" / mutant.file
        whole = path.read_text(encoding="utf-8") if path.exists() else ""
        try:
            text = mutant.planted(whole)
            compile(text, mutant.file, "exec")
        except (ValueError, SyntaxError) as error:
            return Verdict(mutant, "bad", str(error))
        path.write_text(text, encoding="utf-8")
        try:
            report = self.pytest(source, [mutant.test], "-x")
        finally:
            path.write_text(whole, encoding="utf-8")
        return Verdict(mutant, *_judged(report, mutant.test, source), report.seconds)


def _judged(report: Report, node: str, source: Path) -> tuple[str, str]:
    """The word for a mutant, and why."""
    if report.timed_out:
        return "bad", f"no end within {SECONDS} s"
    if report.broken_imports:
        return "bad", f"it does not import: {report.broken_imports[0]}"
    if not report.imported_from(source):
        return "bad", f"the copy of the source was not what ran: {report.output[-500:]}"
    lines = report.of(node)
    failed = [line for line in lines if line["outcome"] == "failed"]
    if failed:
        error = f"{failed[0]['error']}: {failed[0]['text']}"[:90]
        return ("bad", f"it broke the code: {error}") if failed[0]["kind"] == "broken" else ("killed", error)
    if not lines or any(line["outcome"] == "skipped" for line in lines):
        return "bad", f"{node} was skipped" if lines else f"{node} was not run: {report.output[-500:]}"
    return "survived", f"{node} passed"


def read_list(path: Path = LIST) -> list[Mutant]:
    """The mutants, in the order of the file; two of one name are refused."""
    mutants = [Mutant.of(table) for table in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]
    twice = {mutant.name for mutant in mutants if sum(mutant.name == other.name for other in mutants) > 1}
    if twice:
        raise ValueError(f"two mutants are called {', '.join(sorted(twice))}")
    return mutants


def chosen(mutants: list[Mutant], only: list[str], part: str, root: Path = ROOT) -> list[Mutant]:
    """The mutants that were asked for."""
    unknown = set(only) - {mutant.name for mutant in mutants}
    if unknown:
        raise ValueError(f"no mutant is called {', '.join(sorted(unknown))}; --list names them all")
    if only:
        mutants = [mutant for mutant in mutants if mutant.name in only]
    if not part:
        return mutants
    first, _, parts = (f"{part_of_commit(root)}/{PARTS}" if part == "commit" else part).partition("/")
    if not (first.isdecimal() and parts.isdecimal() and 1 <= int(first) <= int(parts)):
        raise ValueError(f'--part {part} must be K/10 with K from 1 to 10, or "commit"')
    return mutants[int(first) - 1 :: int(parts)]


def part_of_commit(root: Path) -> int:
    """Which tenth a commit runs: its hash modulo 10, plus 1. A run can be repeated, and every tenth has its turn."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError(f"--part commit needs a git repository: {found.stderr.strip()}")
    return int(found.stdout.strip(), 16) % PARTS + 1


def run(mutants: list[Mutant], root: Path = ROOT, processes: int = 2) -> list[str]:
    """Run the gate and print a line for each mutant; what comes back is what is wrong."""
    waiting = [mutant for mutant in mutants if mutant.needs]
    for mutant in waiting:
        print(f"waits     {mutant.name}: needs {mutant.needs}", flush=True)
    ready = [mutant for mutant in mutants if not mutant.needs]
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(processes) as pool:
        gate, copies = Gate(root, Path(folder).resolve()), Queue[Path]()
        for number in range(processes):
            copies.put(gate.copy(f"src-{number}"))

        def lent(task: Any, *values: Any) -> Any:
            source = copies.get()
            try:
                return task(source, *values)
            finally:
                copies.put(source)

        nodes = list(dict.fromkeys(mutant.test for mutant in ready))
        first = pool.submit(lent, gate.unmutated, nodes)
        waits = [pool.submit(lent, lambda source, mutant: gate.verdict(mutant, source), mutant) for mutant in ready]
        for done, future in enumerate(as_completed([first, *waits] if nodes else []), start=1):
            result = future.result()
            if not isinstance(result, Verdict):
                wrong += result
                word = "FAILED" if result else "passed"
                print(f"{word:<9} {len(nodes)} named tests on the code as it is", *result, sep="\n    ", flush=True)
                continue
            shown = result.word if result.good else result.word.upper()
            print(
                f"{shown:<9} {result.mutant.name} ({result.seconds:.1f} s, {done} of {len(ready) + 1}): {result.note}",
                flush=True,
            )
            if not result.good:
                wrong.append(f"{result.mutant.name} {result.word}: {result.note}")
    return wrong


def main(arguments: list[str] | None = None, root: Path = ROOT, path: Path = LIST) -> int:
    """The command line; the exit status is 1 where anything is wrong, 2 for a bad option."""
    parser = argparse.ArgumentParser(prog="mutants", description="Plant mutants; the test that each names must fail.")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one mutant; may be repeated")
    parser.add_argument("--part", default="", metavar="K/10", help="every tenth, from the K-th; or: commit")
    parser.add_argument("--list", action="store_true", help="print the list and run nothing")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    try:
        every = read_list(path)
        mutants = chosen(every, options.only, options.part, root)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name} ({mutant.file}): {mutant.why}\n    {mutant.test}")
        return 0
    began = time.perf_counter()
    wrong = run(mutants, root, options.processes)
    waiting = sum(bool(mutant.needs) for mutant in mutants)
    waits = f", {waiting} wait for another branch" if waiting else ""
    print(f"\n{len(mutants)} of {len(every)} mutants{waits}, {time.perf_counter() - began:.0f} s: ", end="")
    print("all killed" if not wrong else f"{len(wrong)} WRONG", *wrong, sep="\n    ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
