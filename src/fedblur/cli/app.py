"""The command `fedblur`. Each subcommand is a file of this folder, imported when it runs: `fedblur --help` is quick."""

from __future__ import annotations

import functools
import importlib
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import click
import typer
import typer.main
from click.exceptions import NoArgsIsHelpError
from typer.core import TyperGroup

from fedblur.cli.errors import BAD_INPUT, STOPPED, end_of_a_bug, usage
from fedblur.cli.output import say, spell_out_greek
from fedblur.core.callbacks import SAVED
from fedblur.core.errors import FedBlurError
from fedblur.core.version import version

# Each command: the function or group that is it, and its line in `fedblur --help` (the first of its own help).
COMMANDS = {
    "run": ("run:run", "Train a model with user-level differential privacy."),
    "resume": ("run:resume", "Continue a run that was stopped or killed, from its last complete checkpoint."),
    "plan": (
        "plan:plan",
        "Find the noise for an epsilon, or the epsilon for a noise level, and what to expect. No data are needed.",
    ),
    "table": ("table:table", "Run tables of experiments and print mean ± standard deviation over seeds."),
    "results": (
        "results:results",
        "List the cells of a table, show one, or export means over seeds (CSV, LaTeX, Markdown).",
    ),
    "plot": ("plot:plot", "Draw a figure for a paper: a metric over ε or any axis, one line for each label."),
    "tune": ("tune:tune", "Choose between configurations at a known privacy cost, and release only the winner."),
    "audit": ("audit:audit_", "Attack the privacy of a run: an empirical epsilon to compare with the accountant's."),
    "statement": (
        "statement:statement",
        "Write statement.md, statement.html and statement.json into the run folder, and print the claim in one line.",
    ),
    "report": (
        "report:report",
        "Write one HTML file about runs: accuracy, norms, signal and noise, fairness, privacy statement, comparison.",
    ),
    "watch": (
        "report:watch",
        "Serve the report of a run on this machine, and update it while the run continues. Ctrl-C ends it.",
    ),
    "data": ("data:app", "List, fetch and inspect data sets."),
    "ledger": ("ledger:app", "Show what runs have spent; sign, seal and verify their ledgers."),
    "population": ("population:app", "Show and limit what all runs on the same people spend together."),
    "deploy": ("deploy:app", "Deploy a real federation over Flower: TLS, keys for nodes, secure sums."),
}
_REPEATABLE = {"table", "tune", "audit"}  # to continue, run the same command again
_TRAINING = {"run", "resume"}
_MARKUP: Literal["markdown"] = "markdown"  # of help texts: it reflows paragraphs, and leaves [base] alone
T = TypeVar("T")


@functools.cache
def _load(name: str) -> click.Command:
    module, attribute = COMMANDS[name][0].split(":")
    found = getattr(importlib.import_module(f"fedblur.cli.{module}"), attribute)
    holder = typer.Typer(rich_markup_mode=_MARKUP)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name)(found)
    return typer.main.get_group(holder).commands[name]


class _Commands(Mapping[str, click.Command]):
    """The commands by name. Looking one up imports it."""

    def __getitem__(self, name: str) -> click.Command:
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LazyGroup(TyperGroup):
    """Imports a command when it runs. Turns errors that the user can fix into one line; bugs show their traceback."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.commands = _Commands()  # type: ignore[assignment]  # nobody adds commands to it

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return what `--help` and the shell's completion show of a command: its name and one line."""
        return click.Command(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is to run."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and self.commands[str(found.name)], rest

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return self._guarded(ctx, lambda: super(LazyGroup, self).parse_args(ctx, args))

    def invoke(self, ctx: Any) -> Any:
        return self._guarded(ctx, lambda: super(LazyGroup, self).invoke(ctx))

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
        except KeyboardInterrupt as stop:
            saved = next((note for note in getattr(stop, "__notes__", ()) if note.startswith(SAVED)), "")
            say(_stopped(str(ctx.invoked_subcommand), saved))
            raise typer.Exit(STOPPED) from None
        raise typer.Exit(BAD_INPUT)


def _stopped(command: str, saved: str) -> str:
    """Return what to say of a command that a signal stopped. `saved`: the note of a run that wrote all that it had."""
    if command in _REPEATABLE:
        return f"stopped{f': {SAVED}' if saved else ''}; rerun the command to continue"
    if saved:
        return f"stopped: {SAVED}; to continue: fedblur resume {saved.removeprefix(f'{SAVED} in ')}"
    if command not in _TRAINING:
        return "stopped"
    return (
        "stopped at once: rounds after the last checkpoint are lost, their releases stay in the ledger; if the run had "
        "begun, fedblur resume continues it"
    )


def stop_like_ctrl_c() -> None:
    """Let SIGTERM and SIGHUP stop a command as Ctrl-C does: what is paid for is saved first. `nohup` stays in force."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


app = typer.Typer(
    name="fedblur",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=_MARKUP,
    help="Federated learning with user-level differential privacy: DP-FedAvg, BLUR, LUS, and an epsilon to check.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedblur {version()}")
        raise typer.Exit


@app.callback()
def _options(
    show: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run `fedblur`: the entry point that pip installs."""
    spell_out_greek()
    stop_like_ctrl_c()
    try:
        app(prog_name="fedblur")
    except Exception as error:
        end_of_a_bug(error)
