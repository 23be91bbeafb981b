"""Own parts from a file that the user names: found like any other, with one line when something is wrong with it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedblur.cli.app import app
from fedblur.core import registry
from fedblur.core.errors import ConfigError
from fedblur.core.plugins import load_plugins, read_config
from tests.commandline import forgotten_parts, invoke

ROOT = Path(__file__).resolve().parents[2]
PART = """
from dataclasses import dataclass
from fedblur import register
from fedblur.learning.methods import Method

@register("method", "planted")
@dataclass(frozen=True)
class Planted(Method):
    strength: float = 1.0
"""


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    """What a test registers is gone after it: contract tests run over all that is registered."""
    with forgotten_parts():
        yield


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_plugin__a_part_in_a_named_file_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", PART)
    load_plugins([path, path])  # twice is once
    assert registry.build("method", {"name": "planted", "strength": 2.0}).strength == 2.0
    with pytest.raises(ConfigError, match="did you mean 'strength'"):
        registry.build("method", {"name": "planted", "strenth": 2.0})


def test_plugin__a_configuration_names_files_from_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "mine.py", PART.replace("planted", "sown"))
    config = write(tmp_path / "c.toml", 'plugins = ["mine.py"]\nmethod = "sown"\n')
    monkeypatch.chdir(ROOT)
    assert read_config(config) == {"method": "sown"}
    assert "sown" in registry.parts("method")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "registers no part"),
        ("import nothing_like_it", "line 1: ModuleNotFoundError"),
        ("x = 1\nx = (", "line 2: SyntaxError"),
        (PART + "\n1 / 0", "line 11: ZeroDivisionError"),
        (PART.replace("(Method)", ""), "must derive from fedblur.Method to be a method"),
        (PART.replace('"method"', '"methd"'), "did you mean 'method'"),
        (PART.replace("planted", "blur"), "two parts want to be method 'blur'"),
        (PART.replace("@dataclass(frozen=True)\n", ""), "put @dataclass below @register"),
    ],
)
def test_plugin__a_broken_file_is_one_line_with_its_place(text: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_plugins([path])
    assert "mine.py" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plugin__what_is_no_python_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_plugins([tmp_path / "none.py"])
    with pytest.raises(ConfigError, match="must be a Python file"):
        load_plugins([write(tmp_path / "mine.txt", PART)])
    config = write(tmp_path / "c.toml", 'plugins = "mine.py"')
    with pytest.raises(ConfigError, match="must be a list of files"):
        read_config(config)


def test_plugin__a_run_folder_never_has_code_executed(tmp_path: Path) -> None:
    """A run that used a plugin says so, and resume asks the user to name the file again."""
    words = ["--plugin", str(ROOT / "examples/own_method.py"), "--method", "project+lus"]
    with forgotten_parts():
        done = CliRunner().invoke(app, ["run", *words, "--rounds", "2", "--out", str(tmp_path / "run"), "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["versions"]["plugin own_method.py"].startswith("sha256 ")
    assert "--plugin FILE" in invoke("resume", tmp_path / "run", status=2)
    assert "project" not in registry.parts("method")


def test_own_method__keeps_the_difference_in_its_ball_for_blocks_of_clients() -> None:
    load_plugins([ROOT / "examples/own_method.py"])
    method = registry.build("method", {"name": "project", "radius": 0.5})
    delta = {"a": torch.randn(7, 3, 4), "b": torch.randn(7, 5)}
    delta["a"][0], delta["b"][0] = 1e-3, 1e-3  # inside the ball: stays
    moved = torch.func.vmap(lambda d: method.after_step(d, torch.tensor(2.0)))(delta)
    norms = torch.cat([tensor.flatten(1) for tensor in moved.values()], dim=1).norm(dim=1)
    assert torch.allclose(norms[1:], torch.ones(6), atol=1e-5)
    assert torch.equal(moved["a"][0], delta["a"][0])
