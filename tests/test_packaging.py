"""What `pip install` gets: a wheel with everything in it, typed, that works in an empty environment."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import fedblur
from fedblur.core.version import version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, made from a copy of the tree."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("the package build is not installed: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_wheel__has_every_source_file_the_embedded_text_and_the_marker_of_types(wheel: Path) -> None:
    wanted = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/fedblur").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == wanted
    assert {"fedblur/py.typed", "fedblur/data/plays.bz2", "fedblur/data/plays.txt"} <= packed
    assert wheel.stat().st_size < 2 * 2**20


def test_wheel__says_version_licence_command_and_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    about = Parser().parsestr(names["METADATA"])
    assert about["Version"] == PROJECT["version"] == version()
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == PROJECT["requires-python"]
    assert {"data", "flower", "ray"} <= set(about.get_all("Provides-Extra"))
    assert "fedblur = fedblur.cli:main" in names["entry_points.txt"]
    assert "Apache License" in names["LICENSE"]


def test_package__passes_the_index_s_own_check(built: Path) -> None:
    if importlib.util.find_spec("twine") is None:
        pytest.skip("the package twine is not installed: pip install -e '.[dev]'")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(built.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_package__embedded_text_is_small_and_says_where_it_is_from() -> None:
    data = Path(fedblur.__file__).parent / "data"
    assert (data / "plays.bz2").stat().st_size <= 400_000
    assert "public domain" in " ".join((data / "plays.txt").read_text(encoding="utf-8").split())


def _run(*words: str, cwd: Path) -> str:
    """A command in an environment that knows nothing of this repository."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "FEDBLUR_"))}
    done = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.long
def test_wheel__installs_into_an_empty_environment_and_trains_there(wheel: Path, tmp_path: Path) -> None:
    """With the versions of constraints.txt: without them pip would fetch gigabytes of CUDA."""
    _run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    scripts = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    install = [str(scripts / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    _run(*install, str(wheel), cwd=tmp_path)

    assert _run(str(scripts / "fedblur"), "--version", cwd=tmp_path).strip() == f"fedblur {version()}"
    words = ["run", "--dataset", "digits", "--epsilon", "2", "--out", "first", "--json"]
    result = json.loads(_run(str(scripts / "fedblur"), *words, cwd=tmp_path))
    assert result["accuracy"] > 0.6
    assert result["privacy"]["warning"] is None
    _run(str(scripts / "fedblur"), "ledger", "verify", "first", cwd=tmp_path)
    json.loads(_run(str(scripts / "fedblur"), "data", "show", "plays", "--json", cwd=tmp_path))
    refused = subprocess.run([scripts / "fedblur", "deploy", "gateway"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "pip install 'fedblur[flower]'" in refused.stderr

    _run(*install, f"{wheel}[flower]", cwd=tmp_path)
    _run(str(scripts / "python"), "-c", "import flwr, fedblur.flower.server", cwd=tmp_path)
    _run(str(scripts / "fedblur"), "deploy", "init", "federation", cwd=tmp_path)
    assert (tmp_path / "federation/app/pyproject.toml").is_file()
