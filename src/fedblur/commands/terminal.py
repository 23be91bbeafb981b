"""Standard output: with --json one document and nothing else; words in place of Greek where it cannot be shown.

Terminals and pipes that know no Greek are those with cp1252 on Windows and with ASCII in containers.
"""

from __future__ import annotations

import codecs
import json
import sys
from typing import Any

import typer

from fedblur.config import canonical

_WORDS = {
    "ε": "epsilon", "δ": "delta", "σ": "sigma", "η": "eta", "Δ": "Delta", "κ": "kappa", "λ": "lambda", "μ": "mu",
    "ρ": "rho", "∞": "inf", "≤": "<=", "≥": ">=", "±": "+-", "×": "x", "·": "*", "÷": "/", "√": "sqrt", "–": "-",
    "—": "-", "…": "...", "•": "*", "→": "->", "−": "-", "‖": "|", "²": "^2",
}  # fmt: skip


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(_WORDS.get(letter, "?") for letter in lost), error.end


def speak_plainly() -> None:
    """Spell out what standard output and standard error cannot encode."""
    codecs.register_error("fedblur", _spelled)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a notebook's streams have none, and need none
        if reconfigure is not None and str(stream.encoding).lower().replace("-", "") != "utf8":
            reconfigure(errors="fedblur")


def print_json(value: Any) -> None:
    """One JSON document on standard output and nothing else there; infinity is a string, since JSON has none."""
    typer.echo(json.dumps(json.loads(canonical(value)), indent=2))
