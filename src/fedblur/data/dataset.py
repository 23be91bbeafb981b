"""Stage 0, what a data set part provides: labelled samples, and who wrote each when that is known.

A data set is one file with one registered part. Most derive from `Dataset` and `load` their samples. A data set whose
clients are computed when they are needed derives from `Generated` and makes its own federation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from fedblur.data.cache import place_of
from fedblur.data.population import Federation, Samples
from fedblur.data.source import Place, Source

Form = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class Raw:
    """A data set before it is divided among clients."""

    train: Samples
    test: Samples
    owners: Tensor | None  # [train samples], int64: natural client 0..K-1 of each; None: not known
    classes: int  # public: known in advance, never counted in the labels
    note: str = ""  # what a table must say about these samples
    made_up_note: str = "synthetic users"  # and what it must add when clients are cut from them
    names: tuple[str, ...] | None = None  # of natural clients 0..K-1: roles follow from them; None: their numbers


class Described(ABC):
    """The description that every data set gives of itself."""

    part_name: ClassVar[str]  # set by @register
    default_partition: ClassVar[str]  # "natural" becomes "dirichlet" where the source has no writers
    default_clients: ClassVar[int | None]  # training clients of made-up partitions; None: the user must say
    summary: ClassVar[str]  # one line for `fedblur data list`
    text: ClassVar[bool] = False  # samples are windows of tokens, int16
    public: ClassVar[bool] = False  # published or generated: runs on them are charged to nobody (docs/populations.md)

    def form(self) -> Form | None:
        """Return the shape of a sample and the number of classes, where they are known without loading."""
        return None

    def place(self, data_dir: Path | None) -> Place:
        """Return where the samples would come from, without loading them."""
        return "built in"


class Dataset(Described):
    """Samples that exist before their clients do."""

    @abstractmethod
    def load(self, data_dir: Path | None) -> Raw:
        """Return all samples, or raise a DataError that says how to get them."""

    def source(self, data_dir: Path | None) -> Source | None:
        """Return where the samples are read from; None: they come with the library, or are not here."""
        return None

    @property
    def cache_name(self) -> str:
        """Return the name of the samples in the cache."""
        return self.part_name

    def place(self, data_dir: Path | None) -> Place:
        source = self.source(data_dir)
        return "built in" if source is None else place_of(self.cache_name, source)


class Divided(Described):
    """Samples whose users are known, and that divides itself among them."""

    @abstractmethod
    def federation(self, clients: int | None, validation_share: float, seed: int, data_dir: Path | None) -> Federation:
        """Return a federation of at most this many training clients; None: of all users."""


class Generated(Described):
    """Clients that are computed from a seed when they are needed."""

    @abstractmethod
    def federation(self, clients: int, validation_share: float, seed: int) -> Federation:
        """Return a federation of exactly this many training clients."""
