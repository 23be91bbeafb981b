"""Stage 0, population. All clients' samples, packed in contiguous tensors with offsets: no object per client.

Sample j of client c is `x[starts[c] + j]`. A cohort is fetched without a copy when the data are in memory, and
generated on the spot when they are not (`synthetic`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fedblur.core.errors import DataError


@dataclass(frozen=True)
class Samples:
    """Labelled samples that belong to nobody in particular: a test set."""

    x: Tensor  # [samples, *shape], uint8 (images, 0..255), float32, or int16 (text: tokens)
    y: Tensor  # [samples], int64

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Shard:
    """The packed samples of the clients of one cohort, in the cohort's order."""

    x: Tensor  # [samples, *shape]
    y: Tensor  # [samples]
    starts: Tensor  # [cohort], int64
    sizes: Tensor  # [cohort], int64


class Population(Protocol):
    """The clients that are protected, or those that are held out for tuning."""

    @property
    def clients(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""

    @property
    def classes(self) -> int: ...

    def fetch(self, ids: Tensor) -> Shard:
        """Return the samples of these clients."""

    def to(self, device: torch.device) -> Population:
        """Return the same clients with their data on a device."""


@dataclass(frozen=True)
class Packed:
    """A population in memory."""

    x: Tensor  # [samples, *shape], uint8, float32 or int16
    y: Tensor  # [samples], int64
    starts: Tensor  # [clients], int64
    sizes: Tensor  # [clients], int64
    classes: int

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"{len(self.x)} samples but {len(self.y)} labels; each sample needs one label")
        if self.x.is_floating_point() and not bool(torch.isfinite(self.x).all()):
            raise DataError("the data contain NaN or infinite values; clean them first (client training would diverge)")
        if len(self.y) and not 0 <= int(self.y.min()) <= int(self.y.max()) < self.classes:
            raise DataError(f"labels run from {int(self.y.min())} to {int(self.y.max())}, but classes={self.classes}")
        if len(self.sizes) and int(self.sizes.min()) < 1:
            empty = int(self.sizes.argmin())
            raise DataError(f"client {empty} has no samples; drop empty clients or give each at least one sample")

    @property
    def clients(self) -> int:
        return len(self.starts)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    def fetch(self, ids: Tensor) -> Shard:
        return Shard(self.x, self.y, self.starts[ids], self.sizes[ids])

    def select(self, ids: Tensor) -> Packed:
        """Return only these clients; the samples are shared, not copied."""
        return replace(self, starts=self.starts[ids], sizes=self.sizes[ids])

    def to(self, device: torch.device) -> Packed:
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def samples(self) -> Samples:
        """Return all samples of all clients, pooled: how validation clients are evaluated."""
        index = sample_index(self.starts, self.sizes)
        return Samples(self.x[index.to(self.x.device)], self.y[index.to(self.y.device)])

    @classmethod
    def from_owners(cls, x: Tensor, y: Tensor, owners: Tensor, classes: int) -> Packed:
        """Pack samples by the client that owns each; `owners` is [samples], -1 leaves a sample out."""
        kept = torch.nonzero(owners >= 0).flatten()
        order = kept[torch.argsort(owners[kept], stable=True)]
        sizes = torch.bincount(owners[kept])
        return cls(x[order], y[order], torch.cumsum(sizes, 0) - sizes, sizes, classes)


def sample_index(starts: Tensor, sizes: Tensor) -> Tensor:
    """Return where the samples of these clients are, client by client: [samples], int64."""
    before = torch.cumsum(sizes, 0) - sizes
    return torch.arange(int(sizes.sum())) + torch.repeat_interleave(starts - before, sizes)


@dataclass(frozen=True)
class Federation:
    """A data set, divided: clients that train, clients that only tune, and test data that only the end sees."""

    name: str  # of the data set
    train: Population  # clients that train
    validation: Samples | None  # samples of clients that only tune; None: there are none
    validation_clients: int  # how many clients only tune
    test: Samples  # held out until the end
    note: str = ""  # what a table must say about these data, for instance that users are synthetic
    validation_sizes: Tensor | None = None  # [validation clients], int64: whose samples follow whose in `validation`
    by_id: bool = False  # whether roles follow from clients' own ids (`roles.py`)
    remote: bool = False  # whether clients' samples stay on their own machines: here, nobody can read them
    population: str | None = None  # whose budget runs on these data are charged to (docs/populations.md)
    public: bool = False  # whether these are nobody's secret: then only a named population is tracked
    members: str = field(default="", repr=False)  # a hash of all client ids, which is never written down as it is
    features: dict[str, Federation] = field(default_factory=dict, init=False, repr=False, compare=False)
    """These data as a fixed front of a model sees them, by the front's key: computed once for all runs on them."""


def as_input(x: Tensor) -> Tensor:
    """Convert stored samples to what a model reads: images 0..255 become floats 0..1; other values stay, as floats."""
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()


def is_text(x: Tensor) -> bool:
    """Return whether stored samples are tokens: whole numbers that are not pixels."""
    return x.dtype == torch.int16
