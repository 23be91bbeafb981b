"""`fedblur.load`: what lies in a folder, for a notebook. In: a run, a table, or result files. Out: a run, or a frame.

Figures that are local only are left out unless they are asked for: what a notebook shows and saves is often shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedblur.core.callbacks import Row, figures_of
from fedblur.core.errors import FedBlurError
from fedblur.privacy.claim import Claim
from fedblur.report.records import Group, Record, as_number, find_records, grouped, read_run
from fedblur.training.run_folder import RunFolder, RunSummary

if TYPE_CHECKING:
    import pandas as pd

    from fedblur.report.frames import TableFrame


@dataclass(frozen=True)
class LoadedRun:
    """A run as its folder has it, finished or not."""

    path: Path
    config: dict[str, Any]  # every setting
    rows: list[Row]  # what each round reported
    summary: RunSummary | None  # None: it has not ended
    label: str  # its method in words

    @property
    def claim(self) -> Claim | None:
        """All that the run states about its privacy; None before its end."""
        return None if self.summary is None else self.summary.privacy

    @cached_property
    def model(self) -> dict[str, Tensor]:
        """The weights by name, for `module.load_state_dict`."""
        return RunFolder(self.path).read_model()

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row a round, as a pandas frame."""
        _demand_pandas()
        from fedblur.report.frames import frame

        return frame([_of_row(row) for row in self.rows])


def load(path: str | Path, *, local_only: bool = False) -> LoadedRun | TableFrame:
    """Read a run folder as a run, and a table, result files or a folder of runs as a pandas frame of one row a cell.

    A table's frame has its axes, seed, metrics, ε and δ as columns, and `.rounds`: one row for each evaluated round of
    each cell. `local_only=True` adds the figures that no noise protects, as far as they are on this machine.
    """
    place = Path(path)
    if RunFolder(place).config.exists():
        record = read_run(place)
        rows = record.rows if local_only else [_shared(row) for row in record.rows]
        summary = record.summary
        return LoadedRun(place, record.config, rows, summary, record.label)
    records = find_records([place])
    _demand_pandas()
    from fedblur.report.frames import TableFrame

    groups = grouped(records)
    cells = [_of_cell(group, record, local_only) for group in groups for record in group.records]
    rounds = [row for group in groups for record in group.records for row in _rounds_of(group, record, local_only)]
    return TableFrame.of(cells, rounds)


def _demand_pandas() -> None:
    try:
        import pandas as pd  # noqa: F401
    except ImportError:
        raise FedBlurError("a table's frame needs pandas, which is not here; pip install pandas") from None


def _shared(row: Row) -> Row:
    return {**row, "local_only": {}}


def _place(group: Group, record: Record) -> dict[str, Any]:
    """Return what says which run this is."""
    axes = {name: value if as_number(value) is None else as_number(value) for name, value in group.axes.items()}
    return {"label": group.label, **axes, "seed": record.seed}


def _of_cell(group: Group, record: Record, local_only: bool) -> dict[str, Any]:
    """Return one row of a table's frame."""
    summary = record.summary
    figures = {measure.name: record.result(measure) for measure in record.measures}
    target = as_number(record.config.get("epsilon"))
    found: dict[str, Any] = {**_place(group, record), **figures}
    found.setdefault("epsilon", math.nan if target is None else target)
    if summary is not None:
        claim = summary.privacy
        found |= {
            "epsilon_spent": claim.epsilon, "delta": claim.delta, "accountant": claim.accountant,
            "noise_multiplier": claim.noise_multiplier, "clients": summary.clients, "parameters": summary.parameters,
            "not_private": (claim.warning or "").removeprefix("NOT PRIVATE: "),
        }  # fmt: skip
    found |= {"last_round": record.rounds_done, "complete": record.complete, "table": record.table, "cell": record.name}
    if local_only and summary is not None:
        found |= {f"local_only.{key}": value for key, value in summary.local_only.items()}
        found["local_only.seconds"] = summary.seconds
    return found


def _rounds_of(group: Group, record: Record, local_only: bool) -> Iterator[dict[str, Any]]:
    """Yield the evaluated rounds of a cell; with what is local only, all that are known."""
    for row in record.rows:
        if figures_of(row) or local_only:
            shown = row if local_only else _shared(row)
            yield {**_place(group, record), **_of_row(shown), "cell": record.name}


def _of_row(row: Row) -> dict[str, Any]:
    """Return a round as a row of a frame."""
    found: dict[str, Any] = {"round": row["round"]}
    if "stage" in row:
        found["stage"] = row["stage"]
    found |= {**figures_of(row), "loss": row.get("loss"), "epsilon_spent": row.get("epsilon")}
    local = row.get("local_only", {})
    found |= {f"local_only.{key}": value for key, value in local.items() if not isinstance(value, list | dict)}
    if local and "seconds" in row:
        found["local_only.seconds"] = row["seconds"]
    return found
