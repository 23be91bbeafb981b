"""Test samples for sources that come as one split. The cut is public: it does not depend on a run's seed."""

from __future__ import annotations

import numpy as np
import torch

from fedblur.core.errors import ConfigError, DataError
from fedblur.core.rng import Seeded
from fedblur.data.source import Split, Stored


def check_share(name: str, share: float) -> None:
    """Refuse a share that does not leave something on both sides."""
    if not 0 < share < 1:
        raise ConfigError(f"{name}={share} must be in (0, 1)")


def only_split(stored: Stored) -> str | None:
    """Return the name of the split if there is just one."""
    return next(iter(stored.splits)) if len(stored.splits) == 1 else None


def train_and_test(stored: Stored, share: float) -> tuple[Split, Split]:
    """Return the source's own two splits, or hold out a share of its only one."""
    only = only_split(stored)
    if only is None:
        return stored.splits["train"], stored.splits["test"]
    return hold_out(stored.splits[only], share)


def both_splits(stored: Stored, name: str) -> tuple[Split, Split]:
    """Return the source's two splits, for a data set that is published with both."""
    only = only_split(stored)
    if only is not None:
        raise DataError(f"{name} has only {only!r} samples here; it needs train-*.parquet and test-*.parquet")
    return stored.splits["train"], stored.splits["test"]


def hold_out(split: Split, share: float) -> tuple[Split, Split]:
    """Return (train, test). With writers the share is taken within each, as in federated EMNIST; else at random.

    Of a writer's n samples floor(share · n) are for test: nobody is left without training samples. A writer's lots
    follow from its own name, so that who else is there changes none of its samples' roles.
    """
    groups = np.zeros(len(split.y), np.int64) if split.writers is None else split.writers.numpy()
    names = split.names()
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
    held = torch.zeros(len(groups), dtype=torch.bool)
    held[order] = torch.from_numpy(rank < np.floor(share * sizes + 1e-9)[groups[order]])  # 0.1 · 30: 2.9999… in floats
    if not held.any():
        raise DataError(f"test_share={share} of {len(split.y)} samples leaves no test samples; raise it")
    return split.take(torch.nonzero(~held).flatten()), split.take(torch.nonzero(held).flatten())


def with_many_samples(split: Split, least: int) -> Split:
    """Return only writers with at least this many samples, renumbered without gaps."""
    assert split.writers is not None
    enough = torch.bincount(split.writers)[split.writers] >= least
    kept = split.take(torch.nonzero(enough).flatten())
    assert kept.writers is not None
    known, codes = torch.unique(kept.writers, return_inverse=True)
    people = known if kept.people is None else kept.people[known]  # numbers of the whole source, where it has no ids
    return Split(kept.x, kept.y, codes, people)
