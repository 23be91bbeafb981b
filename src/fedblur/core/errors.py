"""Errors that a user can cause and fix. Each message is one line: the value, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedBlurError(Exception):
    """An error that the user can fix. The command line prints it and exits with status 2."""


class ConfigError(FedBlurError):
    """A configuration key or value that does not make sense."""


class DataError(FedBlurError):
    """Missing, empty or non-finite data."""


class ModelError(FedBlurError):
    """A model that cannot be trained privately, or that does not fit the data."""


class PrivacyError(FedBlurError):
    """A privacy target that cannot be reached, or a budget that is spent."""


class RoundAborted(PrivacyError):
    """Too few clients for the promised noise: the round is paid for but not applied, and the run continues."""


class RunError(FedBlurError):
    """A run folder that cannot be written, read or continued."""


class LostRankError(RunError):
    """Another process of the run that has ended or does not answer."""


class OwnFunctionError(RunError):
    """A function of the user's that failed between two rounds: the run is saved and can be resumed."""


class TimeIsUp(FedBlurError):
    """The end of a command's time, raised by a watcher between two rounds: the run is saved and can be resumed."""


class DivergedError(FedBlurError):
    """Local training whose updates are all NaN or infinite."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?`, or the list of what is known if nothing is close."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(names)
