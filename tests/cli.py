"""The command line as tests call it, in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from fedblur.cli import app


def invoke(*words: object, status: int = 0) -> str:
    """What a command prints; its exit status must be the expected one."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result.output
