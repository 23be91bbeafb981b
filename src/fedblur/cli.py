"""The command line. Each command is one file in `commands/`; bad input is one line and exit status 2."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from fedblur.commands import audit, data, deploy, ledger, paper, plan, report, run, statement, table, tune
from fedblur.engines.distributed import rank
from fedblur.errors import FedBlurError
from fedblur.version import version

BAD_INPUT = 2
STOPPED = 130


class Guarded(TyperGroup):
    """Turns what a user can mend into one line on standard error; bugs still show their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FedBlurError as error:
            self._say(f"error: {error}")
            raise typer.Exit(BAD_INPUT) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self._say(f"error: {where}{error.strerror or error}")
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            self._say("stopped; what was paid for is saved (fedblur resume goes on)")
            raise typer.Exit(STOPPED) from None

    def _say(self, line: str) -> None:
        who = f"rank {rank()}: " if rank() else ""
        Console(stderr=True, soft_wrap=True).print(who + " ".join(line.split()), markup=False, highlight=False)


app = typer.Typer(
    name="fedblur",
    cls=Guarded,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Federated learning with user-level differential privacy: DP-FedAvg, BLUR, LUS, and an epsilon to check.",
)
app.command("run")(run.run)
app.command("resume")(run.resume)
app.command("plan")(plan.plan)
app.command("table")(table.table)
app.command("paper")(paper.paper)
app.command("tune")(tune.tune)
app.command("audit")(audit.audit_)
app.command("statement")(statement.statement)
app.command("report")(report.report)
app.command("watch")(report.watch)
app.add_typer(data.app, name="data")
app.add_typer(ledger.app, name="ledger")
app.add_typer(deploy.app, name="deploy")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedblur {version()}")
        raise typer.Exit


@app.callback()
def _options(
    show: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point of `fedblur`."""
    app()
