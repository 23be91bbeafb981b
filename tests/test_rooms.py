"""The house: twelve rooms, and each imports only from the rooms to its left."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[1] / "src/fedblur"
ROOMS = (
    "core", "accel", "data", "privacy", "learning", "engines", "training", "voting", "experiments", "report", "flower",
    "cli",
)  # fmt: skip
_NAMED = re.compile(r"fedblur\.([a-z_]+)(?:\.[a-z_0-9]+)*")


def imports(path: Path, text: str) -> Iterator[str]:
    """Yield each of our modules that a file imports: at the top, in a function, for types, or in a string."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room"
            module = node.module or ""
            yield from ([f"fedblur.{alias.name}" for alias in node.names] if module == "fedblur" else [module])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAMED.fullmatch(node.value):
            yield node.value


def upward(path: Path, text: str) -> list[str]:
    """Return the imports of a file that lead to a room further right."""
    here = ROOMS.index(path.relative_to(HOUSE).parts[0])
    rooms = {match[1] for name in imports(path, text) if (match := _NAMED.match(name)) and match[1] in ROOMS}
    return sorted(room for room in rooms if ROOMS.index(room) > here)


BESIDE = {
    "attacks": "adversaries against whole runs",
    "contract": "what holds for every part that is registered",
    "docs": "README and the pages: each block runs, each link leads somewhere",
    "e2e": "what a user does, and a run that is killed",
    "fixtures": "files that earlier versions wrote",
    "mutants": "privacy bugs that are planted into a copy of src/",
    "papers": "the papers' pages and tables",
    "planted": "privacy bugs that are planted by patching, and who catches them",
    "sweeps": "crashes at every file operation, damage to every file, odd inputs",
}
FILES = [path for room in ROOMS for path in sorted((HOUSE / room).rglob("*.py"))]


def test_house__holds_the_twelve_rooms_and_three_files() -> None:
    here = {path.name for path in HOUSE.iterdir()} - {"__pycache__"}
    assert here == {*ROOMS, "__init__.py", "__main__.py", "py.typed"}


@pytest.mark.parametrize("room", ROOMS)
def test_room__imports_only_from_rooms_to_its_left(room: str) -> None:
    wrong = {
        path.relative_to(HOUSE).as_posix(): found
        for path in FILES
        if path.relative_to(HOUSE).parts[0] == room and (found := upward(path, path.read_text(encoding="utf-8")))
    }
    assert wrong == {}


def test_tests__mirror_the_rooms() -> None:
    """Every folder of tests/ is a room or is listed; one inside a room mirrors a folder of that room."""
    tests = Path(__file__).parent
    top = {path.name for path in tests.iterdir() if path.is_dir() and any(path.rglob("*.*")) and path.name[0] != "_"}
    assert top == {*ROOMS, *BESIDE}
    folders = {path.parent.relative_to(tests) for room in ROOMS for path in (tests / room).rglob("test_*.py")}
    assert [folder.as_posix() for folder in folders if not (HOUSE / folder).is_dir()] == []


@pytest.mark.parametrize(
    "line",
    [
        "from fedblur.training.loop import train",
        "import fedblur.training.loop",
        "def late():\n    from fedblur.training import loop",
        "if TYPE_CHECKING:\n    from fedblur.training.loop import Run",
        'import_module("fedblur.training.loop")',
    ],
)
def test_room__an_upward_import_is_seen(line: str) -> None:
    assert upward(HOUSE / "privacy/ledger.py", line) == ["training"]
    assert upward(HOUSE / "flower/server.py", line) == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/tour.md"])
def test_rooms__are_listed_on_the_page_in_their_order(page: str) -> None:
    text = (HOUSE.parents[1] / page).read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)) == ROOMS
    assert {path.name for path in HOUSE.iterdir() if path.is_dir()} - {"__pycache__"} == {*ROOMS}
