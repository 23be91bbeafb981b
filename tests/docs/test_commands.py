"""Every `fedblur …` command that a page or an example quotes parses: the command and its options exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer.main

from fedblur.cli.app import app
from tests.docs.blocks import PAGES, ROOT

EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.*"))
_QUOTED = re.compile(r"(?:^#? *|`|\$ |-m )fedblur((?: [^`\n#]*)?)", re.MULTILINE)


def commands(text: str) -> list[str]:
    """Return what follows `fedblur` wherever a text quotes it: at a line's start, in backquotes, after a prompt."""
    return [found.strip() for found in _QUOTED.findall(text.replace("\\\n", " ")) if found.strip()]


def wrong(command: str) -> str:
    """Return what is wrong with a quoted command, or nothing; `ledger show|verify` names two commands."""
    here: Any = typer.main.get_command(app)
    words = command.split()
    while words and hasattr(here, "commands") and re.match(r"[a-z]", words[0]):
        names = re.split(r"\\?\|", words.pop(0).rstrip(".,;:)"))
        missing = [name for name in names if name not in here.commands]
        if missing:
            return f"fedblur {command}: there is no command {missing[0]!r}"
        here = here.commands[names[0]]
    known = {"--help"} | {
        option for parameter in here.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    options = [match[1] for word in words if (match := re.match(r"\[?(--[a-z-]+)", word))]
    missing = [option for option in options if option not in known]
    return f"fedblur {command}: there is no option {missing[0]}" if missing else ""


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES])
def test_page__quoted_commands_and_options_exist(page: str) -> None:
    assert not [fault for command in commands((ROOT / page).read_text(encoding="utf-8")) if (fault := wrong(command))]


def test_guide__shows_every_command() -> None:
    shown = {
        command.split()[0] for command in commands((ROOT / "docs/guides/command-line.md").read_text(encoding="utf-8"))
    }
    named: Any = typer.main.get_command(app)
    assert {name for name, command in named.commands.items() if not command.hidden} <= shown


def test_guide__lists_every_environment_variable() -> None:
    named = re.compile(r"\bFEDBLUR_[A-Z_]+")
    read = {name for path in (ROOT / "src").rglob("*.py") for name in named.findall(path.read_text(encoding="utf-8"))}
    assert read == {*named.findall((ROOT / "docs/guides/command-line.md").read_text(encoding="utf-8"))}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Call `fedblur train --epsilon 2`.", "no command 'train'"),
        ("```console\n$ fedblur run --epsilom 2\n```", "no option --epsilom"),
        ("fedblur ledger check RUN", "no command 'check'"),
        ("torchrun -m fedblur run --ranks 2", "no option --ranks"),
        ("# fedblur data list --all", "no option --all"),
        ("`fedblur ledger show|verify`, `fedblur COMMAND --help`, `fedblur run X --quiet # --fast`", ""),
    ],
)
def test_commands__that_do_not_exist_are_found(text: str, fault: str) -> None:
    assert fault in " ".join(map(wrong, commands(text)))
    assert bool(fault) == any(map(wrong, commands(text)))
