"""README's Python runs as it stands, commands of README and docs/guides/command-line.md parse, figures are right."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedblur.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
COMMAND_LINE = (ROOT / "docs/guides/command-line.md").read_text()
COMMANDS = re.findall(r"^(fedblur [^\n#]+)", README + COMMAND_LINE, re.MULTILINE)


def test_readme__python_example_runs_in_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "readme.py").write_text(code)
    runpy.run_path("readme.py", run_name="__main__")
    accuracy = float(re.search(r"accuracy ([\d.]+) at epsilon ([\d.]+)", capsys.readouterr().out)[1])
    assert accuracy > 0.8
    assert len([line for line in code.splitlines() if line]) <= 10


def test_readme__fits_on_two_screens() -> None:
    assert len(README.splitlines()) <= 90
    assert len(README) <= 6000


def test_readme__the_plan_gives_the_figures_it_promises() -> None:
    command = next(c for c in COMMANDS if c.startswith("fedblur plan"))
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert "2.178" in result.stdout
    assert "2.38" in result.stdout


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_readme__every_command_and_flag_exists(command: str) -> None:
    words = shlex.split(command)[1:]
    names = words[:2] if words[0] in ("data", "deploy") else words[:1]
    help_text = CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": "300", "NO_COLOR": "1"}).stdout
    for flag in (word for word in words if word.startswith("--")):
        assert flag in help_text


def test_documents__every_test_that_privacy_names_exists() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+?)(?:…)?`", (ROOT / "docs/privacy.md").read_text()):
        assert f"def {name}" in sources, name
