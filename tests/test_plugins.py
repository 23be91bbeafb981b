"""Own parts from a file that the user names: found like any other, with one line when something is wrong with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedblur import registry
from fedblur.errors import ConfigError
from fedblur.plugins import load_plugins, read_config

ROOT = Path(__file__).resolve().parents[1]
PART = """
from dataclasses import dataclass
from fedblur import register
from fedblur.methods import Method

@register("method", "planted")
@dataclass(frozen=True)
class Planted(Method):
    strength: float = 1.0
"""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it: contract tests run over all that is registered."""
    for kind in registry.KINDS:
        registry.parts(kind)  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "_PARTS", {kind: dict(parts) for kind, parts in registry._PARTS.items()})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("fedblur_plugin_"):
            del sys.modules[name]


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
        (PART.replace("(Method)", ""), "must derive from fedblur.methods.Method"),
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


def fedblur(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedblur", *words], cwd=cwd, capture_output=True, text=True, encoding="utf-8"
    )


def test_plugin__a_run_folder_never_has_code_executed(tmp_path: Path) -> None:
    """A run that used a plugin says so, and resume asks the user to name the file again."""
    words = ["--plugin", str(ROOT / "examples/own_method.py"), "--method", "project+lus"]
    done = fedblur("run", *words, "--rounds", "2", "--out", "run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["versions"]["plugin own_method.py"].startswith("sha256 ")
    refused = fedblur("resume", "run", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--plugin FILE" in refused.stderr


def test_own_method__keeps_the_difference_in_its_ball_for_blocks_of_clients() -> None:
    load_plugins([ROOT / "examples/own_method.py"])
    method = registry.build("method", {"name": "project", "radius": 0.5})
    delta = {"a": torch.randn(7, 3, 4), "b": torch.randn(7, 5)}
    delta["a"][0], delta["b"][0] = 1e-3, 1e-3  # inside the ball: stays
    moved = torch.func.vmap(lambda d: method.after_step(d, torch.tensor(2.0)))(delta)
    norms = torch.cat([tensor.flatten(1) for tensor in moved.values()], dim=1).norm(dim=1)
    assert torch.allclose(norms[1:], torch.ones(6), atol=1e-5)
    assert torch.equal(moved["a"][0], delta["a"][0])
