"""Exit codes and error lines: an error that the user can fix is one line on standard error and status 2.

docs/exit-codes.md lists the statuses.
"""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import fields

import click

from fedblur.cli.output import say
from fedblur.core.config import Config
from fedblur.core.errors import nearest
from fedblur.core.plugins import blame

FOUND, BAD_INPUT, BUG, STOPPED = 1, 2, 70, 130
_GUESSES = re.compile(r"[\s.(]*did you mean.*", re.IGNORECASE)


def usage(error: click.UsageError) -> str:
    """Return what is wrong with the words of a command, the nearest right one, and where the help is."""
    message = error.format_message()
    path = "fedblur" if error.ctx is None else " ".join(["fedblur", *error.ctx.command_path.split()[1:]])
    guess = _guess(error)
    if guess:
        message = f"{_GUESSES.sub('', message).rstrip(' .')}: {guess}"
    return f"{message.rstrip('.')} (see {path} --help)"


def _guess(error: click.UsageError) -> str:
    """Return the nearest option or command, or nothing."""
    if error.ctx is None:
        return ""
    if isinstance(error, click.NoSuchOption):
        options = [name for option in error.ctx.command.params for name in option.opts if name.startswith("--")]
        key = error.option_name.lstrip("-").replace("-", "_")
        if "--set" in options and key in {field.name for field in fields(Config)}:
            return f"give it as --set {key}=VALUE"
        return nearest(error.option_name, options)
    unknown = re.match(r"No such command '(.+?)'", error.format_message())
    if unknown and isinstance(error.ctx.command, click.Group):
        return nearest(unknown[1], error.ctx.command.commands)
    return ""


def end_of_a_bug(error: Exception) -> None:
    """Print an unexpected error's traceback and ask for a report; print one line if the user can do something."""
    own = blame(error)
    if isinstance(error, MemoryError):  # also pyarrow's
        own = own or "the memory of this machine or process is full; use fewer rows or a smaller model, or give it more"
    if own:
        say(f"error: {own}")
        sys.exit(BAD_INPUT)
    traceback.print_exc()
    print("fedblur has a bug: please report the lines above and the command that you ran", file=sys.stderr)
    sys.exit(BUG)
