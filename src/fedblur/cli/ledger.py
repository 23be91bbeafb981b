"""`fedblur ledger show` and `verify`: what was spent, recomputed from the events, and whether the ledger is intact."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedblur.cli.errors import FOUND
from fedblur.cli.options import Json, Plugin
from fedblur.cli.output import print_json
from fedblur.core.config import canonical
from fedblur.core.errors import ConfigError, RunError
from fedblur.core.files import read_bytes, write_atomically
from fedblur.privacy import events
from fedblur.privacy.accounting import ACCOUNTANTS
from fedblur.privacy.ledger_file import open_ledger
from fedblur.privacy.signature import check_seal, check_signature, make_key, seal, sign
from fedblur.report.text import in_short
from fedblur.training.run_folder import RunFolder
from fedblur.training.verify_ledger import Books, compose, ledger_path, neighbours, read_books, unprotected, verify

_SECRECY = {
    "operating system": "",
    "seed": "; not private: seeded noise (ε is that of the same run with secret noise)",
    "unaudited part": "; it claims no ε: a mechanism or a sampler of the user's own passed no audit",
    "unknown": "; where its noise came from is not recorded",
}

_LONGEST_PATH = 4096

app = typer.Typer(no_args_is_help=True, help="Show what runs have spent; sign, seal and verify their ledgers.")
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")]


@app.command("show")
def show(
    runs: Runs,
    delta: Annotated[float | None, typer.Option(help="δ of the total (default: the smallest of the runs).")] = None,
    json_: Json = False,
) -> None:
    """Recompute epsilon from the events; several runs on the same clients are composed into one total.

    Example: `fedblur ledger show runs/first runs/second`
    """
    books = [read_books(run) for run in runs]
    total_delta, total = compose(books, delta)
    if json_:
        why = unprotected(books)
        print_json(
            {
                "runs": [_facts(book) for book in books],
                "total": {
                    "delta": total_delta,
                    "epsilon": total,
                    "adjacency": neighbours(books),
                    "infinite_because": why,
                },
            }
        )
        return
    table = Table(box=None, pad_edge=False)
    for column in ("run", "releases", "rounds", "δ", "ε (PLD)", "ε (RDP)", "budget"):
        table.add_column(column, overflow="fold")
    for book in books:
        facts = _facts(book)
        epsilons = [_epsilon(facts["epsilon"][name]) for name in ACCOUNTANTS]
        counts = str(facts["releases"]), str(facts["rounds"]), f"{book.budget.delta:.3g}"
        table.add_row(escape(facts["run"]), *counts, *epsilons, f"{book.budget.epsilon:.4g}")
    if len(books) > 1 or delta is not None:
        count = str(sum(len(book.spends) for book in books))
        table.add_row("together", count, "", f"{total_delta:.3g}", *(_epsilon(total[name]) for name in ACCOUNTANTS))
    Console().print(table)
    for book in books:
        kinds = "; ".join(sorted({_words(event) for _, event in book.spends})) or "nothing yet"
        words = f"{book.path} released {kinds}{_SECRECY[book.randomness]}"
        Console().print(words, highlight=False, markup=False, soft_wrap=True)
    if (len(books) > 1 or delta is not None) and (why := unprotected(books)):
        Console().print(f"ε together is ∞, since {why}.", highlight=False, markup=False, soft_wrap=True)
    if len(books) > 1:
        relation = neighbours(books)
        if relation is not None and len({neighbours([book]) for book in books if book.spends}) > 1:
            Console(soft_wrap=True).print(f"The total is about the weakest of their neighbours: {relation}.")
        words = (
            "The total holds if the runs are on the same clients. On different clients, each run has its own epsilon."
        )
        Console(soft_wrap=True).print(words)


@app.command("verify")
def verify_(
    runs: Runs,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The operator's public key: the ledger must be signed by it.")
    ] = None,
    sealed: Annotated[
        str | None,
        typer.Option("--seal", help="The line that fedblur ledger seal printed, or a file with it."),
    ] = None,
    plugin: Plugin = None,
    json_: Json = False,
) -> None:
    """Check the hash chain, that nothing is missing, and that noise and epsilon follow from the configuration.

    Anyone can write a whole folder anew. `--key` finds what was written without the operator's key, `--seal` what does
    not continue the ledger that was sealed. Exit status 1 means that something was found.

    Example: `fedblur ledger verify runs/first --key operator.pub`
    """
    if sealed is not None and len(runs) > 1:
        raise ConfigError("--seal is of one ledger; give one run")
    checked = {run: [*verify(run), *_outside(run, key, sealed)] for run in runs}
    if json_:
        print_json([{"run": str(run), "verified": not found, "findings": found} for run, found in checked.items()])
    for run, findings in () if json_ else checked.items():
        for finding in findings:
            typer.echo(f"{run}: NOT VERIFIED: {finding}")
        if not findings:
            book = read_books(run)
            name, delta = book.budget.accountant, book.budget.delta
            spent = f"ε = {_epsilon(book.epsilon(name))} ({name.upper()}) at δ = {delta:.3g}"
            summary = RunFolder(ledger_path(run).parent).stored_summary()
            own = summary.privacy.own_parts if summary is not None else None
            if summary is not None and summary.privacy.unclaimed:
                spent = f"claims no ε: {summary.privacy.unclaimed}"
            elif book.randomness == "seed":
                spent = f"not private: seeded noise (with secret noise: {spent})"
            old = "" if book.bound else "; opened by version 0.2, which did not bind it to the model and the summary"
            typer.echo(f"{run}: verified, {len(book.spends)} releases, {spent}, ledger {book.chain.head}{old}")
            for part in own or ():
                typer.echo(f"  not FedBlur's: {part.told}")
    if any(checked.values()):
        raise typer.Exit(FOUND)


def _outside(run: Path, key: Path | None, sealed: str | None) -> list[str]:
    """Return what a key and a seal find, which come from outside of the folder."""
    if key is None and sealed is None:
        return []
    try:
        chain = open_ledger(ledger_path(run))
        return [*(check_signature(chain, key) if key else []), *(check_seal(chain, _seal_in(sealed)) if sealed else [])]
    except ConfigError:  # of the key or the seal that was given
        raise
    except RunError as error:
        return [str(error)]


def _seal_in(text: str) -> str:
    """Return the seal that was given, or is in the file that was given."""
    path = Path(text)
    return read_bytes(path).decode("utf-8", "replace") if len(text) < _LONGEST_PATH and path.is_file() else text


@app.command("key")
def key_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the private key; FILE.pub is public.")],
    json_: Json = False,
) -> None:
    """Make an Ed25519 key to sign ledgers with. Keep the private one away from those who run the training.

    Example: `fedblur ledger key operator`
    """
    public = make_key(file)
    if json_:
        print_json({"private": str(file), "public": str(public)})
        return
    typer.echo(f"Private key: {file} (only you can read it). Public key: {public}, for those who verify.")


@app.command("sign")
def sign_(
    runs: Runs,
    key: Annotated[Path, typer.Option(metavar="FILE", help="The operator's private key (PEM, Ed25519).")],
    plugin: Plugin = None,
    json_: Json = False,
) -> None:
    """Sign the ledgers as they are now. Each run is verified first; a run with findings is refused.

    Example: `fedblur ledger sign runs/first --key operator`
    """
    for run in runs:
        if findings := verify(run):
            raise RunError(f"{run} is not signed: {findings[0]}")
    signed = {run: sign(open_ledger(ledger_path(run)), key) for run in runs}
    if json_:
        print_json([{"run": str(run), "signature": str(path)} for run, path in signed.items()])
        return
    for run, path in signed.items():
        typer.echo(f"{run}: signed in {path}")


@app.command("seal")
def seal_(
    runs: Runs,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it to this file, too.")] = None,
    json_: Json = False,
) -> None:
    """Print one line that stands for a ledger. Keep it elsewhere: in a mail, a commit, with a notary.

    Example: `fedblur ledger seal runs/first`
    """
    seals = {run: seal(open_ledger(ledger_path(run))) for run in runs}
    if out is not None:
        write_atomically(out, "".join(f"{text}\n" for text in seals.values()).encode())
    if json_:
        print_json([{"run": str(run), "seal": text} for run, text in seals.items()])
        return
    for text in seals.values():
        typer.echo(text)


def _facts(book: Books) -> dict[str, Any]:
    kinds = {canonical(events.to_json(event)) for _, event in book.spends}
    return {
        "run": str(book.path),
        "releases": len(book.spends),
        "rounds": len({round_ for round_, _ in book.spends}),
        "delta": book.budget.delta,
        "epsilon": {name: book.epsilon(name) for name in ACCOUNTANTS},
        "budget": book.budget.epsilon,
        "randomness": book.randomness,
        "events": [json.loads(kind) for kind in sorted(kinds)],
        "ledger": {"lines": len(book.chain.links), "head": book.chain.head},
    }


def _words(value: Any) -> str:
    """Write an event as Python does, with few digits."""
    if is_dataclass(value):
        settings = ", ".join(f"{field.name}={_words(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({settings})"
    if isinstance(value, tuple):
        left = f", … {len(value) - 4} more" if len(value) > 8 else ""  # coefficients of a matrix
        return f"({', '.join(_words(item) for item in (value[:4] if left else value))}{left})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _epsilon(value: float | None) -> str:
    return in_short(value, 4)
