"""Nothing is bound to Linux: calls that only some systems have are few, guarded and listed; encodings are named."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "msvcrt", "winreg"}
CALLS = {
    "fork", "forkpty", "sched_getaffinity", "sched_setaffinity", "getuid", "geteuid", "getgid", "setsid", "killpg",
    "getpgid", "uname", "getloadavg", "sync", "chown", "mkfifo", "sysconf", "nice", "O_DIRECTORY", "O_NOFOLLOW",
    "SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "alarm", "setitimer", "CDLL", "statvfs",
}  # fmt: skip
FOLDERS = re.compile(r"^/(proc|dev|tmp|sys|etc|usr|home)\b")

# Each is guarded where it stands, and hidden by the second test.
GUARDED = {
    ("ledger.py", "fcntl"): "try: import; Windows does without the lock, and a broken chain is refused",
    ("files.py", "fcntl"): "try: import; without it a folder is for one command at a time, as the user keeps to it",
    ("populations.py", "fcntl"): "try: import; without it one command at a time on a population (docs/populations.md)",
    ("gateway.py", "resource"): "sys.platform; elsewhere the limit of open files stays what it is",
    ("cache_files.py", "geteuid"): "os.name; elsewhere owner and mode are not compared",
    ("cpu.py", "CDLL"): "sys.platform",
    ("native.py", "CDLL"): "sys.platform and platform.machine; elsewhere torch's own layers",
    ("timing.py", "/proc/cpuinfo"): "suppressed where it is not there",
    ("cpu.py", "sched_getaffinity"): "hasattr, else os.cpu_count",
}


def bound(tree: ast.AST) -> set[str]:
    """What in a file only some systems have."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} & MODULES
        elif isinstance(node, ast.Attribute) and node.attr in CALLS and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id in {"os", "signal", "ctypes"} else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and FOLDERS.match(node.value):
            found.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg in {"start_new_session", "preexec_fn", "pass_fds"}:
            found.add(node.arg)
    return found


def test_portability__what_only_some_systems_have_is_listed_with_its_guard() -> None:
    found = {(path.name, name) for path in SOURCES for name in bound(ast.parse(path.read_text(encoding="utf-8")))}
    assert found == GUARDED.keys(), f"guard new ones, and list them with the guard: {found ^ GUARDED.keys()}"


def test_portability__the_scan_finds_what_it_looks_for() -> None:
    planted = 'import fcntl\nimport os\nos.fork()\nopen("/proc/meminfo")\nimport signal\nsignal.SIGKILL'
    assert bound(ast.parse(planted)) == {"fcntl", "fork", "/proc/meminfo", "SIGKILL"}


def opens_text(node: ast.AST) -> bool:
    """Whether this opens a file as text without saying in which encoding."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    modes = {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    text = name in ("read_text", "write_text") or (name == "open" and bool({"r", "w", "a"} & modes))
    return text and not any(keyword.arg == "encoding" for keyword in node.keywords)


def test_portability__text_files_have_a_named_encoding() -> None:
    """The default on Windows is not UTF-8."""
    trees = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert not [f"{name}:{node.lineno}" for name, tree in trees.items() for node in ast.walk(tree) if opens_text(node)]


HIDDEN = """
import os, sys, pkgutil, importlib
import numpy, torch, scipy.special, sklearn.datasets, sklearn.model_selection, matplotlib.figure, rich.progress, typer
for name in ("fcntl", "resource", "pwd", "grp", "termios", "syslog", "triton", "flwr"):
    sys.modules[name] = None
for name in ("fork", "sched_getaffinity", "getuid", "geteuid", "uname", "getloadavg", "killpg", "setsid"):
    if hasattr(os, name):
        delattr(os, name)
real = os.open
def no_folders(path, *rest, **more):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))  # as Windows answers
    return real(path, *rest, **more)
os.open = no_folders

import fedblur
import fedblur.accel.cpu, fedblur.engines.workers, fedblur.privacy.ledger
assert fedblur.privacy.ledger.fcntl is None
assert fedblur.accel.cpu.usable_cores() >= 1
class elsewhere:
    platform = "win32"
fedblur.accel.cpu.sys = elsewhere
assert fedblur.accel.cpu.keep_freed_memory() is False
for module in pkgutil.walk_packages(fedblur.__path__, "fedblur."):
    if not module.name.startswith(("fedblur.accel.kernels.triton", "fedblur.flower.", "fedblur.__main__")):
        importlib.import_module(module.name)

sys.argv = ["fedblur", "run", "--rounds", "2", "--quiet", "--out", "here"]
from fedblur.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
sys.argv = ["fedblur", "ledger", "verify", "here"]
main()
"""


def test_portability__imports_and_trains_where_linux_only_parts_are_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HIDDEN)], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified, 2 releases" in done.stdout


def test_portability__a_terminal_without_greek_gets_words(tmp_path: Path) -> None:
    words = ["plan", "--clients", "100", "--sample-rate", "0.1", "--rounds", "10", "--epsilon", "2"]
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-m", "fedblur", *words], env=environment, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode("cp1252")
    assert "noise multiplier sigma" in said
    assert "delta = 0.01" in said
