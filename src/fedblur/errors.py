"""The errors that a user can cause and mend. Each message is one line: the value, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedBlurError(Exception):
    """Something the user can put right. The command line prints it and exits with status 2."""


class ConfigError(FedBlurError):
    """A configuration key or value that does not make sense."""


class DataError(FedBlurError):
    """Data that are missing, empty or not finite."""


class ModelError(FedBlurError):
    """A model that cannot be trained privately, or that does not fit the data."""


class PrivacyError(FedBlurError):
    """A privacy target that cannot be reached, or a budget that is spent."""


class RoundAborted(PrivacyError):
    """Too few clients for the noise that was promised: the round is paid for and not applied, and the run goes on."""


class RunError(FedBlurError):
    """A run folder that cannot be written, read or continued."""


class LostRankError(RunError):
    """Another process of a run that is gone or does not answer."""


class DivergedError(FedBlurError):
    """Local training that gives nothing but NaN or infinite updates."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of what is known when nothing is close."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(names)
