"""Terminals and pipes that know no Greek (cp1252 on Windows, ASCII in containers): words in its place, no crash."""

from __future__ import annotations

import codecs
import sys

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
