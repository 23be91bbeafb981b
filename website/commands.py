"""The reference of the command line, made from the Typer application itself: nothing in it is typed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer.main

from fedblur.cli.app import app


def reference() -> str:
    """Every command with its usage, arguments and options, as Markdown."""
    return "\n".join(
        line for path, command in _walk("fedblur", typer.main.get_command(app)) for line in _page(path, command)
    )


def _walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _walk(f"{path} {name}", inner)


def _page(path: str, command: Any) -> Iterator[str]:
    groups = bool(getattr(command, "commands", {}))
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    yield f"## `{path}`\n" if path == "fedblur" or groups else f"### `{path}`\n"
    yield inspect.cleandoc(command.help or "") + "\n"
    if not groups:
        arguments = "".join(
            f" {_argument(parameter)}" for parameter in shown if parameter.param_type_name == "argument"
        )
        yield f"`{path}{arguments} [options]`\n"
    rows = [_row(parameter) for parameter in shown]
    if rows:
        yield "| | | default |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    name = f"{name}…" if parameter.nargs == -1 else name
    return str(name if parameter.required else f"[{name}]")


def _row(parameter: Any) -> str:
    names = (
        _argument(parameter)
        if parameter.param_type_name == "argument"
        else ", ".join([*parameter.opts, *parameter.secondary_opts])
    )
    many = " (repeatable)" if getattr(parameter, "multiple", False) else ""
    variable = f" Environment: `{parameter.envvar}`." if getattr(parameter, "envvar", None) else ""
    return f"| `{names}` | {_cell(parameter.help or '')}{variable}{many} | {_default(parameter)} |"


def _default(parameter: Any) -> str:
    value = parameter.default
    nothing = value is None or callable(value) or value in ("", [], (), False) or "UNSET" in repr(value).upper()
    return "" if nothing else f"`{value}`"


def _cell(text: str) -> str:
    """Text of a help line: it may hold brackets of rich, and bars that a table would take for its own."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
