"""Standard output and standard error: one JSON document with --json, and plain words where Greek cannot be shown.

Terminals and pipes that know no Greek are those with cp1252 on Windows and with ASCII in containers.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
from typing import Any

import click

from fedblur.core.config import canonical

_WORDS = {
    "ε": "epsilon", "δ": "delta", "σ": "sigma", "η": "eta", "Δ": "Delta", "κ": "kappa", "λ": "lambda", "μ": "mu",
    "ρ": "rho", "∞": "inf", "≤": "<=", "≥": ">=", "±": "+-", "×": "x", "·": "*", "÷": "/", "√": "sqrt", "–": "-",
    "—": "-", "…": "...", "•": "*", "→": "->", "−": "-", "‖": "|", "²": "^2",
}  # fmt: skip


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(_WORDS.get(letter, "?") for letter in lost), error.end


def spell_out_greek() -> None:
    """Replace what standard output and standard error cannot encode by words."""
    codecs.register_error("fedblur", _spell)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a notebook's streams have none, and need none
        if reconfigure is not None and str(stream.encoding).lower().replace("-", "") != "utf8":
            reconfigure(errors="fedblur")


def say(line: str) -> None:
    """Print one line on standard error; under torchrun it begins with the number of the process."""
    who = ""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process: only then is torch needed
        from fedblur.engines.distributed import rank

        who = f"rank {rank()}: " if rank() else ""
    click.echo(who + " ".join(line.split()), err=True)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output; infinity becomes a string, since JSON has none."""
    click.echo(json.dumps(json.loads(canonical(value)), indent=2))
