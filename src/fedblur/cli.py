"""The command line. Each command is one file in `commands/`; bad input is one line and exit status 2."""

from __future__ import annotations

from typing import Annotated

import typer

from fedblur.commands import audit, data, deploy, ledger, paper, plan, report, run, statement, table, tune
from fedblur.commands.guard import Guarded, end_of_a_bug
from fedblur.commands.terminal import speak_plainly
from fedblur.version import version

app = typer.Typer(
    name="fedblur",
    cls=Guarded,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # reflows paragraphs, and leaves [base] alone
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
    speak_plainly()
    try:
        app(prog_name="fedblur")
    except Exception as error:
        end_of_a_bug(error)
