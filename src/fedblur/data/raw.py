"""Stage 0, what a data set part gives: labelled samples, and who wrote each when that is known.

A data set is one file with one registered part. Most derive from `Dataset` and `load` their samples; one
whose clients are computed when they are needed derives from `Generated` and makes its own federation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from torch import Tensor

from fedblur.data.population import Federation, Samples
from fedblur.data.source import Source

Place = Literal["built in", "cached", "in the data dir", "needs fetch"]
Form = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class Raw:
    """A data set before it is divided among clients."""

    train: Samples
    test: Samples
    owners: Tensor | None  # [train samples], int64: natural client 0..K-1 of each; None: nobody knows
    classes: int  # public: known beforehand, never counted in the labels
    note: str = ""  # what a table must say about these samples
    made_up_note: str = "synthetic users"  # and what it must add when clients are cut from them
    names: tuple[str, ...] | None = None  # of natural clients 0..K-1: roles follow from them; None: their numbers


class Described(ABC):
    """What every data set says about itself."""

    part_name: ClassVar[str]  # set by @register
    default_partition: ClassVar[str]  # "natural" becomes "dirichlet" where the source has no writers
    default_clients: ClassVar[int | None]  # training clients of made-up partitions; None: the user must say
    summary: ClassVar[str]  # one line for `fedblur data list`
    text: ClassVar[bool] = False  # samples are windows of tokens, int16

    def form(self) -> Form | None:
        """Shape of a sample and number of classes, where they are known without loading."""
        return None

    def place(self, data_dir: Path | None) -> Place:
        """Where the samples would come from, without loading them."""
        return "built in"


class Dataset(Described):
    """Samples that exist before their clients do."""

    @abstractmethod
    def load(self, data_dir: Path | None) -> Raw:
        """All samples; DataError with the way out when they are not here."""

    def source(self, data_dir: Path | None) -> Source | None:
        """Where the samples are read from; None: they come with the library, or are not here."""
        return None


class Generated(Described):
    """Clients that are computed from a seed when they are needed."""

    @abstractmethod
    def federation(self, clients: int, validation_share: float, seed: int) -> Federation:
        """A federation of exactly this many training clients."""
