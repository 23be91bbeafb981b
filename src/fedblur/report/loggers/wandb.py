"""Rounds as steps of a Weights & Biases run: offline in RUN/wandb (WANDB_MODE=offline), or on the server that it uses.

Records are made to be uploaded, offline ones too (`wandb sync`), so `local_only` figures are left out unless they were
asked for. What W&B collects of its own is switched off: console, code, git, command line, and the load of this machine.
It still notes when a record was made: a round takes longer the more clients came.
"""

from __future__ import annotations

import json
import netrc
import os
from typing import Any
from urllib.parse import urlsplit

from fedblur.core.callbacks import Row
from fedblur.core.errors import ConfigError, RunError
from fedblur.core.files import make_folder, read_json_if_there, write_atomically
from fedblur.report.loggers import Occasion, figures
from fedblur.training.run_folder import RunFolder

PROJECT = "fedblur"
_OFFLINE = ("offline", "dryrun", "disabled")


class WandbLogger:
    """One W&B run for each run; the cells of a table are a group."""

    def __init__(self, occasion: Occasion) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nothing about a private run is told to anyone
        try:
            import wandb
        except ImportError:
            raise ConfigError("--logger wandb needs W&B, which is not here; pip install 'fedblur[wandb]'") from None
        self.occasion = occasion
        self.offline = os.environ.get("WANDB_MODE", "online") in _OFFLINE
        if not (self.offline or _logged_in()):  # or W&B would ask in the first round, which is paid for
            raise ConfigError("--logger wandb needs a login: run wandb login, set WANDB_API_KEY, or WANDB_MODE=offline")
        self._wandb: Any = wandb
        self._run: Any = None

    @property
    def note(self) -> str:
        where = str(self.occasion.home / "wandb") if self.offline else "Weights & Biases"
        held = "with local_only figures, as asked" if self.occasion.local_only else "no local_only figures"
        return f"W&B records: {where} (metrics, loss and ε; {held})"

    def __call__(self, row: Row) -> None:
        found = figures(row, self.occasion.local_only)
        if not found:
            return
        if self._run is None:
            self._run = self._open()
        stage = f"{row['stage']}/" if "stage" in row else ""
        self._run.log({"round": row["round"], **{stage + name: value for name, value in found.items()}})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if RunFolder(self.occasion.folder).complete else 1)

    def _open(self) -> Any:
        occasion = self.occasion
        make_folder(occasion.home / "wandb", private=True)
        path = occasion.folder / "wandb.json"
        known = read_json_if_there(path, "delete it") or {}  # of a run that is resumed
        settings = self._wandb.Settings(
            console="off", disable_git=True, disable_code=True, x_disable_meta=True, x_disable_stats=True, host="-",
            silent=True,
        )  # fmt: skip
        try:
            run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT), dir=str(occasion.home), id=known.get("run"),
                resume="allow", name=occasion.name, group=occasion.group or None, settings=settings,
                config={**RunFolder(occasion.folder).resolved(), "fedblur_note": self.note},
            )  # fmt: skip
        except (self._wandb.errors.Error, OSError) as error:
            words = (str(error).splitlines() or [type(error).__name__])[0]
            raise RunError(f"W&B cannot start a run: {words}; fix it, or set WANDB_MODE=offline, and resume") from None
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        write_atomically(path, json.dumps({"run": run.id}).encode())
        return run


def _logged_in() -> bool:
    """Return whether W&B finds a key without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
