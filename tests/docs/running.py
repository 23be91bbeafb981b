"""Runs a page's blocks in order, in a new folder, and compares what they print with what the page shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fedblur.cli.app import app
from fedblur.core.config import from_dict
from fedblur.experiments.table_spec import read_spec
from tests.docs.blocks import ROOT, Block

POINTS = 2.0  # by how much a percentage may differ: sums in floating point differ between processors
SHELLS = ("bash", "sh", "console")
_NEEDS_SHELL = re.compile(r"[|<>;&$`*]")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)(?= %| ±)|(?<=± )(\d+(?:\.\d+)?)")


class PageRun:
    """A page while it is followed: its folder, and the names that its Python has defined."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.printed = ""
        self.ran = 0

    def follow(self, blocks: list[Block]) -> None:
        for number, block in enumerate(blocks):
            if block.not_run or block.run_by:
                self.printed = ""
                continue
            later = "\n".join(other.text for other in blocks[number + 1 :])
            self._one(block, later)
            self.ran += 1

    def _one(self, block: Block, later: str) -> None:
        if block.title:
            assert Path(block.title).stem in later, f"{block.where}: nothing on the page uses {block.title}"
            (self.folder / block.title).write_text(block.text)
        elif block.language == "python":
            self.printed = self._python(block)
        elif block.language in SHELLS:
            self._shell(block)
        elif block.language == "toml":
            _check_toml(block, self.folder)
        elif block.language == "text":
            assert block.shows_output, f"{block.where}: text must follow the block that prints it, or say 'not run'"
            compare(block.text, self.printed, block.where)
        else:
            raise AssertionError(f"{block.where}: a block in {block.language or 'no language'} cannot be run")

    def _python(self, block: Block) -> str:
        out = io.StringIO()
        code = compile("\n" * block.line + block.text, str(ROOT / block.page), "exec")  # errors name the page's line
        with contextlib.redirect_stdout(out):
            exec(code, self.names)
        return out.getvalue()

    def _shell(self, block: Block) -> None:
        pairs = _commands(block)
        self.printed = ""
        for number, (command, shown) in enumerate(pairs):
            printed, status = self._command(command)
            expected = block.status if number == len(pairs) - 1 else 0
            assert status == expected, f"{block.where}: {command}\nexits with {status}\n{printed}"
            if block.language == "console":
                compare(shown, printed, f"{block.where}: {command}")
            self.printed += printed

    def _command(self, command: str) -> tuple[str, int]:
        """Inside this process where it is fedblur without a shell's signs but `> FILE`: starting one costs seconds."""
        plain, _, file = command.partition(" > ")
        words = shlex.split(plain, comments=True)
        if words[0] == "fedblur" and not _NEEDS_SHELL.search(plain + file):
            done = CliRunner().invoke(app, words[1:], prog_name="fedblur")
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                raise done.exception
            if file:
                (self.folder / file.strip()).write_text(done.stdout)
            return done.stderr if file else done.output, done.exit_code
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        settings = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
        shell = ["bash", "-euo", "pipefail", "-c", command]
        result = subprocess.run(
            shell, cwd=self.folder, env=settings, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return result.stdout, result.returncode


def _commands(block: Block) -> list[tuple[str, str]]:
    """Each command of a block with what the page shows below it."""
    text = block.text.replace("\\\n", " ")
    if block.language != "console":
        return [(line, "") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)
    assert not parts[0], f"{block.where}: a console block starts with '$ '"
    return list(zip(parts[1::2], parts[2::2], strict=True))


def _check_toml(block: Block, folder: Path) -> None:
    table = tomllib.loads(block.text)
    if "base" in table:
        (folder / "table.toml").write_text(block.text)
        read_spec(folder / "table.toml")
    else:
        from_dict(table)


def compare(shown: str, printed: str, where: str) -> None:
    """… stands for anything, spaces at line ends do not count, percentages may differ by POINTS."""
    shown, printed = _trimmed(shown), _trimmed(printed)
    pattern = "".join(
        f"({_number})" if number else re.escape(text).replace("…", r"[\s\S]*?") for text, number in _split(shown)
    )
    found = re.fullmatch(pattern, printed)
    assert found, f"{where} shows\n{shown}\nbut prints\n{printed}"
    values = [float(text) for text, number in _split(shown) if number]
    for value, actual in zip(values, found.groups(), strict=True):
        assert abs(value - float(actual)) <= POINTS, f"{where} shows {value} but prints {actual} in\n{printed}"


_number = r"\d+(?:\.\d+)?"


def _split(text: str) -> list[tuple[str, bool]]:
    """A text in pieces; those that are percentages are marked."""
    pieces, end = [], 0
    for match in _PERCENT.finditer(text):
        pieces += [(text[end : match.start()], False), (match[0], True)]
        end = match.end()
    return [*pieces, (text[end:], False)]


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
