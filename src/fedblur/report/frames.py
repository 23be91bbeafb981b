"""Frames of pandas, which is imported here and nowhere else: a table's cells, with their rounds beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd


def frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return a frame of rows that may lack some columns; seeds and counts stay whole numbers, unknown ones are NA."""
    made = pd.DataFrame(list(rows))
    whole = [name for name in ("seed", "round", "last_round", "clients", "parameters") if name in made]
    return made.astype(dict.fromkeys(whole, "Int64"))


class TableFrame(pd.DataFrame):  # type: ignore[misc]  # pandas has no types here
    """One row a cell of a table. What is computed from it is a plain frame, without `rounds`."""

    _metadata = ["_rounds"]  # noqa: RUF012  # pandas' own hook for attributes

    @classmethod
    def of(cls, cells: Sequence[dict[str, Any]], rounds: Sequence[dict[str, Any]]) -> TableFrame:
        """Return the frame of these cells and their rounds."""
        made = cls(frame(cells))
        object.__setattr__(made, "_rounds", frame(rounds))
        return made

    @property
    def _constructor(self) -> Any:
        return pd.DataFrame

    @property
    def rounds(self) -> pd.DataFrame:
        """One row for each evaluated round of each cell (long format): label, axes, seed, round and figures."""
        found: pd.DataFrame = self._rounds
        return found
