"""Stage 0, population. All clients' samples, packed in contiguous tensors with offsets: no object per client.

Sample j of client c is `x[starts[c] + j]`. A cohort is fetched without a copy when the data are in memory, and
generated on the spot when they are not (`synthetic`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, overload

import torch
from torch import Tensor

from fedblur.core.errors import DataError

Inputs = Tensor | dict[str, Tensor]  # what a model reads: one tensor, or several by the names of its arguments


@overload
def each_input(inputs: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor: ...
@overload
def each_input(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs: ...
def each_input(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply a function to the one tensor, or to each of several."""
    return {name: function(x) for name, x in inputs.items()} if isinstance(inputs, dict) else function(inputs)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Return the tensors of inputs: one, or several."""
    return list(inputs.values()) if isinstance(inputs, dict) else [inputs]


def one_input(inputs: Inputs, who: str) -> Tensor:
    """Return the one tensor; refuse several. `who` reads one only."""
    if isinstance(inputs, dict):
        raise DataError(f"{who} reads samples of one tensor, but these have {', '.join(inputs)}; give one")
    return inputs


@dataclass(frozen=True)
class Samples:
    """Labelled samples that belong to nobody in particular: a test set."""

    x: Inputs  # [samples, *shape] each: uint8 (images, 0..255), float32, int16 (text), int64 or int32 (tokens)
    y: Tensor  # [samples, *target]: int64 for classes and tokens, float32 for numbers

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Shard:
    """The packed samples of the clients of one cohort, in the cohort's order."""

    x: Inputs  # [samples, *shape]
    y: Tensor  # [samples, *target]
    starts: Tensor  # [cohort], int64
    sizes: Tensor  # [cohort], int64


class Population(Protocol):
    """The clients that are protected, or those that are held out for tuning."""

    @property
    def clients(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample; of the first tensor where a sample has several."""

    @property
    def classes(self) -> int:
        """The number of classes, tokens or items that targets are of; 0 where targets are numbers."""

    def fetch(self, ids: Tensor) -> Shard:
        """Return the samples of these clients."""

    def to(self, device: torch.device) -> Population:
        """Return the same clients with their data on a device."""


@dataclass(frozen=True)
class Packed:
    """A population in memory."""

    x: Inputs  # [samples, *shape], uint8, float32, int16, int32 or int64; or several by name
    y: Tensor  # [samples, *target], int64 or float32
    starts: Tensor  # [clients], int64
    sizes: Tensor  # [clients], int64
    classes: int

    def __post_init__(self) -> None:
        for x in tensors_of(self.x):
            if len(x) != len(self.y):
                raise DataError(f"{len(x)} samples but {len(self.y)} labels; each sample needs one label")
            if x.is_floating_point() and not bool(torch.isfinite(x).all()):
                raise DataError(
                    "the data contain NaN or infinite values; clean them first (client training would diverge)"
                )
        # other targets are checked by their task (`Task.check_targets`)
        one_class = self.y.dim() == 1 and not self.y.is_floating_point()
        if len(self.y) and one_class and not 0 <= int(self.y.min()) <= int(self.y.max()) < self.classes:
            raise DataError(f"labels run from {int(self.y.min())} to {int(self.y.max())}, but classes={self.classes}")
        if len(self.sizes) and int(self.sizes.min()) < 1:
            empty = int(self.sizes.argmin())
            raise DataError(f"client {empty} has no samples; drop empty clients or give each at least one sample")

    @property
    def clients(self) -> int:
        return len(self.starts)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(tensors_of(self.x)[0].shape[1:])

    def fetch(self, ids: Tensor) -> Shard:
        return Shard(self.x, self.y, self.starts[ids], self.sizes[ids])

    def select(self, ids: Tensor) -> Packed:
        """Return only these clients; the samples are shared, not copied."""
        return replace(self, starts=self.starts[ids], sizes=self.sizes[ids])

    def to(self, device: torch.device) -> Packed:
        return replace(self, x=each_input(self.x, lambda x: x.to(device)), y=self.y.to(device))

    def samples(self) -> Samples:
        """Return all samples of all clients, pooled: how validation clients are evaluated."""
        index = sample_index(self.starts, self.sizes)
        return Samples(each_input(self.x, lambda x: x[index.to(x.device)]), self.y[index.to(self.y.device)])

    @classmethod
    def from_owners(cls, x: Inputs, y: Tensor, owners: Tensor, classes: int) -> Packed:
        """Pack samples by the client that owns each; `owners` is [samples], -1 leaves a sample out."""
        kept = torch.nonzero(owners >= 0).flatten()
        order = kept[torch.argsort(owners[kept], stable=True)]
        sizes = torch.bincount(owners[kept])
        return cls(each_input(x, lambda x: x[order]), y[order], torch.cumsum(sizes, 0) - sizes, sizes, classes)


def sample_index(starts: Tensor, sizes: Tensor) -> Tensor:
    """Return where the samples of these clients are, client by client: [samples], int64."""
    before = torch.cumsum(sizes, 0) - sizes
    return torch.arange(int(sizes.sum())) + torch.repeat_interleave(starts - before, sizes)


@dataclass(frozen=True)
class Federation:
    """A data set divided among clients: training clients, validation clients for tuning, and test data."""

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
    test_owners: Tensor | None = None  # [test samples], int64: whose each is, a training client or -1; None: unknown
    features: dict[str, Federation] = field(default_factory=dict, init=False, repr=False, compare=False)
    """These data as a fixed front of a model sees them, by the front's key: computed once for all runs on them."""


@overload
def as_input(x: Tensor) -> Tensor: ...
@overload
def as_input(x: Inputs) -> Inputs: ...
def as_input(x: Inputs) -> Inputs:
    """Convert stored samples to what a model reads: images 0..255 become floats 0..1, tokens stay whole numbers.

    Text of the library's own (int16) is read as floats that are whole numbers, as in version 0.1.
    """
    return each_input(x, _as_input)


def _as_input(x: Tensor) -> Tensor:
    if x.dtype == torch.uint8:
        return x.float() / 255
    return x if x.dtype in (torch.int64, torch.int32) else x.float()


def is_text(x: Inputs) -> bool:
    """Return whether stored samples are the library's own text: windows of tokens."""
    return isinstance(x, Tensor) and x.dtype == torch.int16


def made_up(like: Samples, count: int, classes: int, generator: torch.Generator) -> Samples:
    """Make up samples of nobody, with shapes and types like these, for timings and checks.

    Numbers are between 0 and 1, tokens at most the largest of `like`, where no client's data are.
    """

    def values(x: Tensor, below: int) -> Tensor:
        shape = (count, *x.shape[1:])
        if x.is_floating_point():
            return torch.rand(shape, generator=generator)
        return torch.randint(0, max(2, below), shape, generator=generator).to(x.dtype)

    def values_of_inputs(x: Tensor) -> Tensor:
        known = {torch.uint8: 256, torch.int16: classes, torch.float32: 0}
        return values(x, known[x.dtype] if x.dtype in known else 1 + int(x.max()))

    return Samples(each_input(like.x, values_of_inputs), values(like.y, classes))
