"""Test samples for sources that come as one split. The cut is public: it does not depend on a run's seed."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedblur.data.source import Split, Stored
from fedblur.errors import ConfigError, DataError
from fedblur.rng import Seeded


def check_share(name: str, share: float) -> None:
    """A share that leaves something on both sides."""
    if not 0 < share < 1:
        raise ConfigError(f"{name}={share} must be in (0, 1)")


def only_split(stored: Stored) -> str | None:
    """The name of the split when there is just one."""
    return next(iter(stored.splits)) if len(stored.splits) == 1 else None


def train_and_test(stored: Stored, share: float) -> tuple[Split, Split]:
    """The source's own two splits, or a share of its only one held out."""
    only = only_split(stored)
    if only is None:
        return stored.splits["train"], stored.splits["test"]
    return hold_out(stored.splits[only], share)


def both_splits(stored: Stored, name: str) -> tuple[Split, Split]:
    """The source's two splits, for a data set that is published with both."""
    if only_split(stored) is not None:
        only = only_split(stored)
        raise DataError(f"{name} has only {only!r} samples here; it needs train-*.parquet and test-*.parquet")
    return stored.splits["train"], stored.splits["test"]


def hold_out(split: Split, share: float) -> tuple[Split, Split]:
    """(train, test). With writers the share is taken within each, as in federated EMNIST; else at random."""
    groups = torch.zeros_like(split.y) if split.writers is None else split.writers
    held = torch.from_numpy(_held(groups.numpy(), split.names(), share))
    if not held.any():
        raise DataError(f"test_share={share} of {len(split.y)} samples leaves no test samples; raise it")
    return split.take(torch.nonzero(~held).flatten()), split.take(torch.nonzero(held).flatten())


def _held(groups: NDArray[np.int64], names: tuple[str, ...] | None, share: float) -> NDArray[np.bool_]:
    """In each group of n samples, floor(share · n) of them: nobody is left without training samples.

    A writer's lots follow from its own name, so that who else is there changes none of its samples' roles.
    """
    lots = Seeded.root(0).child("test split")
    if names is None:
        lottery = lots.numpy().random(len(groups))
    else:
        by_writer, counts = np.argsort(groups, kind="stable"), np.bincount(groups, minlength=len(names))
        drawn = [lots.child(name).numpy().random(int(count)) for name, count in zip(names, counts, strict=True)]
        lottery = np.empty(len(groups))
        lottery[by_writer] = np.concatenate(drawn)
    order = np.lexsort((lottery, groups))  # by group, and by lot within it
    sizes = np.bincount(groups)
    rank = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    held = np.zeros(len(groups), dtype=np.bool_)
    held[order] = rank < np.floor(share * sizes + 1e-9)[groups[order]]  # 0.1 · 30 is 2.9999… in floats
    return held


def with_many_samples(split: Split, least: int) -> Split:
    """Only writers with at least this many samples, renumbered without gaps."""
    assert split.writers is not None
    enough = torch.bincount(split.writers)[split.writers] >= least
    kept = split.take(torch.nonzero(enough).flatten())
    assert kept.writers is not None
    known, codes = torch.unique(kept.writers, return_inverse=True)
    people = known if kept.people is None else kept.people[known]  # numbers of the whole source, where it has no ids
    return Split(kept.x, kept.y, codes, people)
