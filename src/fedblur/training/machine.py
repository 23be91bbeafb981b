"""The machine of a run: device, engine, precision, and the folder of its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from fedblur.core.errors import ConfigError
from fedblur.core.switches import SWITCHES, switched_on
from fedblur.engines.distributed import own_device
from fedblur.engines.local import EngineName
from fedblur.training.run_folder import RunFolder

Precision = Literal["auto", "bf16", "fp32"]


@dataclass(frozen=True)
class Machine:
    """The place where a run computes: device, engine, precision, data. It does not change what a result means."""

    device: str = "auto"  # "auto": a GPU where there is one; "cpu", "cuda", "cuda:1"
    engine: EngineName = "auto"  # "auto": the faster one, by a timing; "vectorised": blocks of clients; "sequential"
    data_dir: Path | None = None  # data sets in the hub's layout; None: the cache
    precision: Precision = "auto"  # "auto": bf16 on a GPU that has it; "bf16", "fp32"
    rank_timeout: float = 600.0  # seconds that processes under torchrun wait for each other
    paid_by: Path | None = None  # the ledger of a search that has paid for this trial; it must cover it

    def half(self, device: torch.device) -> bool:
        """Return whether to compute in bfloat16 (weights, updates and sums stay float32): on GPUs that have it."""
        able = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return self.precision == "bf16" or (self.precision == "auto" and able)

    def as_recorded(self, folder: RunFolder) -> Machine:
        """Return it with the run's first engine, unless the user names one: another engine gives other bits."""
        recorded = folder.recorded_engine(self.torch_device().type)
        if self.engine != "auto" or recorded not in get_args(EngineName):
            return self
        return replace(self, engine=cast(EngineName, recorded))

    def torch_device(self) -> torch.device:
        """Return the device; refuse one that is not here, and switches that are neither on nor off."""
        for switch in SWITCHES:
            switched_on(switch)
        name = own_device(self.device)
        if name == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(name)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"device={self.device!r} cannot be used: {reason}; try --device cpu") from None
        return device
