"""How commands end: what a user can mend is one line on standard error and status 2, never a traceback.

docs/exit-codes.md lists the statuses.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click
import typer
from click.exceptions import NoArgsIsHelpError
from rich.console import Console
from typer.core import TyperGroup

from fedblur.config import Config
from fedblur.engines.distributed import rank
from fedblur.errors import FedBlurError, nearest
from fedblur.plugins import blame

FOUND, BAD_INPUT, BUG, STOPPED = 1, 2, 70, 130
_REPEATED = {"table", "tune", "audit"}  # commands of many runs: they find what is done by themselves
_GUESSES = re.compile(r"[\s.(]*did you mean.*", re.IGNORECASE)
T = TypeVar("T")


class Guarded(TyperGroup):
    """Turns what a user can mend into one line; bugs still show their traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return self._guarded(ctx, lambda: super(Guarded, self).parse_args(ctx, args))

    def invoke(self, ctx: Any) -> Any:
        return self._guarded(ctx, lambda: super(Guarded, self).invoke(ctx))

    def _guarded(self, ctx: Any, act: Callable[[], T]) -> T:
        try:
            return act()
        except NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            say(f"error: {usage(error)}")
        except FedBlurError as error:
            say(f"error: {error}")
        except BrokenPipeError:  # `fedblur … | head`: nobody listens
            raise
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            say(f"error: {where}{error.strerror or error}")
        except KeyboardInterrupt:
            again = "the same command" if ctx.invoked_subcommand in _REPEATED else "fedblur resume"
            say(f"stopped; what was paid for is saved ({again} goes on)")
            raise typer.Exit(STOPPED) from None
        raise typer.Exit(BAD_INPUT)


def say(line: str) -> None:
    """One line on standard error; under torchrun with the number of the process."""
    who = f"rank {rank()}: " if rank() else ""
    Console(stderr=True, soft_wrap=True).print(who + " ".join(line.split()), markup=False, highlight=False)


def usage(error: click.UsageError) -> str:
    """What is wrong with the words of a command, the nearest right one, and where the help is."""
    message = error.format_message()
    path = "fedblur" if error.ctx is None else " ".join(["fedblur", *error.ctx.command_path.split()[1:]])
    guess = _guess(error)
    if guess:
        message = f"{_GUESSES.sub('', message).rstrip(' .')}: {guess}"
    return f"{message.rstrip('.')} (see {path} --help)"


def _guess(error: click.UsageError) -> str:
    """The nearest option or command."""
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
    """The traceback of what nobody expected, and what to do with it; one line where a user's own file is the cause."""
    own = blame(error)
    if own:
        say(f"error: {own}")
        sys.exit(BAD_INPUT)
    traceback.print_exc()
    print("fedblur has a bug: please report the lines above and the command that you ran", file=sys.stderr)
    sys.exit(BUG)
