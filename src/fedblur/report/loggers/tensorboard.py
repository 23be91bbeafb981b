"""Rounds as TensorBoard scalars, in RUN/tensorboard. Local only: see `fedblur.report.loggers`."""

from __future__ import annotations

from typing import Any

from fedblur.core.callbacks import Row
from fedblur.core.errors import ConfigError
from fedblur.core.files import make_folder
from fedblur.report.loggers import Occasion, figures


class TensorBoardLogger:
    """One scalar for each figure of a round; `tensorboard --logdir RUN` shows them."""

    def __init__(self, occasion: Occasion) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "--logger tensorboard needs TensorBoard, which is not here; pip install 'fedblur[tensorboard]'"
            ) from None
        cell = "".join(letter if letter.isalnum() or letter in " +-=." else "_" for letter in occasion.title)
        self.folder = occasion.home / "tensorboard" / cell  # of a table: a run of TensorBoard for each cell
        self._make: Any = SummaryWriter
        self._writer: Any = None

    @property
    def note(self) -> str:
        return f"TensorBoard records: {self.folder} (local only: the guarantee does not protect them)"

    def __call__(self, row: Row) -> None:
        if self._writer is None:  # a resumed run writes its last rounds again: the older ones are dropped
            make_folder(self.folder, private=True)
            self._writer = self._make(str(self.folder), purge_step=row["round"])
        stage = f"{row['stage']}/" if "stage" in row else ""
        for name, value in figures(row, local=True).items():
            self._writer.add_scalar(stage + name, value, row["round"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
