"""Style and types are part of the suite: one gate. How long a function may be is for its reader to judge."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "papers/rendering").rglob("*.py")])


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join
)
def test_style__passes(command: list[str]) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_source__is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "a module says its stage and contract"
    assert text.count("\n") <= 500, "split it by meaning"


def test_only_accounting_imports_dp_accounting() -> None:
    importers = [
        path.name
        for path in SOURCES
        if "dp_accounting" in path.read_text() and "import dp_accounting" in path.read_text()
    ]
    assert set(importers) == {"accountants.py"}


def test_all__is_what_the_package_offers() -> None:
    import fedblur

    offered = {name for name, value in vars(fedblur).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert offered <= set(fedblur.__all__)
    assert set(dir(fedblur)) == set(fedblur._HOMES) == set(fedblur.__all__)  # the rest is imported when it is used
    for name in fedblur.__all__:
        assert getattr(fedblur, name).__doc__, name


def test_suite__tests_of_one_file_share_a_process(request: pytest.FixtureRequest) -> None:
    """`make test` deals groups out by the end of a test's name; without it each process runs every file's fixtures."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("one process has all tests")
    group = Path(__file__).relative_to(ROOT).as_posix()
    assert request.node.nodeid.endswith(f"@{group}")


CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "getrusage"}
HANG = 60  # seconds: the least that a test waits for another process, thread or page


def clock_watching(text: str) -> list[str]:
    """Return the lines of a test file that depend on how busy the machine is: a clock that is read, a short wait."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            wrong = name.removesuffix("_ns") in CLOCKS or ast.unparse(node) in ("time.time", "time.time_ns", "os.times")
        elif isinstance(node, ast.ImportFrom):
            wrong = node.module == "time" and {alias.name for alias in node.names} != {"sleep"}
        elif isinstance(node, ast.keyword) and node.arg == "timeout" and isinstance(node.value, ast.Constant):
            wrong = isinstance(node.value.value, int | float) and node.value.value < HANG
        else:
            wrong = False
        if wrong:
            found.append(f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_tests__never_look_at_a_clock(path: Path) -> None:
    """Speed belongs to benchmarks. A test counts work (`calls` of tests/worlds.py) or waits for an event."""
    assert clock_watching(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "assert time.perf_counter() - began < 20",
        "began = time.monotonic_ns()",
        "from time import process_time as now",
        "assert process.wait(timeout=20) == 0",
    ],
)
def test_tests__a_clock_is_seen(line: str) -> None:
    assert clock_watching(line)
    assert not clock_watching("time.sleep(0.005)\nprocess.wait(timeout=300)\nfrom time import sleep")


# First words that are no verb: "The sum of" is "Return the sum of", and "Whether" is "Return whether".
NO_VERBS = {"A", "All", "An", "By", "How", "Of", "One", "The", "What", "Where", "Whether", "Which", "Who", "Why"}
NO_NOUNS = {"How", "Of", "What", "Where", "Which", "Who", "Why"}


def poor_docstrings(text: str) -> list[str]:
    """Return docstrings of functions without a verb at first, and of modules and classes that ask a question."""
    poor = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = getattr(node, "decorator_list", [])
        names = isinstance(node, ast.Module | ast.ClassDef) or any("property" in ast.unparse(d) for d in decorators)
        first, _, _ = (ast.get_docstring(node) or "").partition("\n")
        if first.split(" ")[0].rstrip(",:") in (NO_NOUNS if names else NO_VERBS):
            poor.append(first)
    return poor


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_docstrings__begin_with_a_verb_or_a_noun(path: Path) -> None:
    assert not poor_docstrings(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "poor"),
    [
        ('"""What a room holds."""', True),
        ('"""A room and what it holds."""', False),
        ('def f():\n    """Whether it holds."""', True),
        ('def f():\n    """The sum."""', True),
        ('def f():\n    """Return the sum."""', False),
        ('class C:\n    """What it holds."""', True),
        ('class C:\n    @property\n    def p(self):\n        """The sum."""', False),
    ],
)
def test_docstrings__that_begin_poorly_are_found(text: str, poor: bool) -> None:
    assert bool(poor_docstrings(text)) == poor


# Who may write or remove files. All that a run, a table, a search or an audit keeps passes core/files.py or the
# ledger's chain: the sweeps (tests/sweeps) fail each of their operations.
WRITERS = {
    "core/files.py": "the one writer",
    "privacy/ledger.py": "the chain, which appends",
    "core/cache_files.py": "caches, which are made again",
    "training/run_folder.py": "its lock file",
    "accel/kernels/native.py": "a cache of compiled kernels",
    "data/cache.py": "a cache of samples",
    "data/packed.py": "a cache of samples",
    "data/hub.py": "a scratch folder for downloads",
    "experiments/audit/isolation.py": "a scratch folder",
    "experiments/audit/worst_case.py": "a scratch folder",
    "report/plots.py": "pictures, which are drawn again",
}
_WRITING = {
    "write_text", "write_bytes", "unlink", "rmdir", "mkdir", "touch", "rename", "symlink_to", "savefig", "save_file",
    "TemporaryDirectory", "NamedTemporaryFile", "mkstemp", "rmtree", "copytree", "copyfile", "makedirs", "ftruncate",
}  # fmt: skip


def writes(text: str) -> list[str]:
    """Return the calls of a source file that write or remove files."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        whole = ast.unparse(node.func)
        modes = [
            value.value
            for value in [*node.args, *(key.value for key in node.keywords)]
            if isinstance(value, ast.Constant)
        ]
        opens = name == "open" and any(
            isinstance(mode, str) and mode[:1] in ("w", "a", "x") and len(mode) < 4 for mode in modes
        )
        if name in _WRITING or opens or whole in ("os.open", "os.write", "os.replace", "os.remove"):
            found.append(f"line {node.lineno}: {whole}")
    return found


def test_files__are_written_and_removed_in_one_place() -> None:
    house = ROOT / "src/fedblur"
    found = {path.relative_to(house).as_posix(): writes(path.read_text()) for path in house.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls and name not in WRITERS} == {}
    assert [name for name in WRITERS if not found.get(name)] == [], "these write nothing any more: drop them"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("path.write_text('x')", True),
        ("open(path, 'w')", True),
        ("path.open('ab')", True),
        ("os.replace(a, b)", True),
        ("open(path)", False),
        ("path.open('rb')", False),
        ("text.replace('a', 'b')", False),
    ],
)
def test_files__a_call_that_writes_is_seen(text: str, seen: bool) -> None:
    assert bool(writes(text)) == seen
