"""Which files of src/fedblur one round enters: `python tools/trace_round.py [OPTIONS OF fedblur run]`.

A small seeded run goes through the command line's own entry. Every function that is called while the second round is
computed is noted by `sys.setprofile`, in all threads; the first round warms caches up, as in any long run. The round
begins where the loop calls `run_round` and ends with the row in rounds.jsonl, so that saving, evaluating and showing
are not in it. The files are listed in the order in which the round enters them.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

SOURCES = Path(__file__).resolve().parents[1] / "src" / "fedblur"
RUN = ["--dataset", "digits", "--rounds", "120", "--seed", "1", "--device", "cpu", "--quiet"]
TRACED = 2  # which call of `run_round`


def files_of_a_round(options: list[str]) -> list[str]:
    """Run the command, and return the files that its second round enters, in their order."""
    from fedblur.cli.app import main
    from fedblur.training import loop

    entered: dict[str, None] = {}
    calls = 0
    plain: Callable[..., Any] = loop.run_round

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(SOURCES)):
            entered[Path(path).relative_to(SOURCES).as_posix()] = None

    def traced(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != TRACED:
            return plain(*arguments, **named)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            return plain(*arguments, **named)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    loop.run_round = traced
    return_code: object = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["fedblur", "run", *options, "--out", f"{folder}/run"]
        try:
            main()
        except SystemExit as end:
            return_code = end.code
        finally:
            loop.run_round = plain
    if return_code not in (0, None) or not entered:
        raise SystemExit(f"the run ended with {return_code} after {calls} rounds")
    return list(entered)


if __name__ == "__main__":
    found = files_of_a_round(sys.argv[1:] or RUN)
    print(f"{len(found)} files")
    print("\n".join(found))
