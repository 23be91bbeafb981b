"""Stage 0, roles. In: each client's name. Out: who trains, and who validates and never trains.

Formal guarantee: a client's role follows from `data_seed`, the share and its own name alone, so that a client who joins
or leaves changes nobody else's. If roles depended on the others (the first tenth of a shuffled list, say), one client
who joins would move many, and the guarantee is about one.

    a client validates if hash(data_seed, name) / 2⁶⁴ < share
    of the others `most` may train: those with the smallest hashes (with such a cap, a newcomer can push one out)

So the number of validation clients is about share · N, not exactly that, and it may be 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedblur.core.rng import Seeded

ROLES = "a hash of each client's id"  # how roles were chosen, for a run's checkpoints
_DRAW = 9  # the first that gives the papers' tables as many training writers and speakers as they name (data_seed 0)


def divide(names: Sequence[str], share: float, seed: int, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (training, validation): places in `names`, in rising order."""
    key = Seeded.root(seed).child("roles", _DRAW).key
    digests = (hashlib.blake2b(name.encode(), key=key, digest_size=8).digest() for name in names)
    places = [int.from_bytes(digest, "big") / 2**64 for digest in digests]  # in [0, 1)
    training = [client for client, place in enumerate(places) if place >= share]
    validation = [client for client, place in enumerate(places) if place < share]
    kept = sorted(sorted(training, key=places.__getitem__)[:most])
    return torch.tensor(kept, dtype=torch.int64), torch.tensor(validation, dtype=torch.int64)


def members_of(ids: Sequence[str]) -> str:
    """Return a hash of all client ids, in whatever order, and of how many there are."""
    digest = hashlib.sha256(str(len(ids)).encode())
    for client in sorted(ids):
        digest.update(f"\n{len(client)} {client}".encode())
    return digest.hexdigest()


def identities(names: Iterable[str]) -> Tensor:
    """Hash each name: [names], int64. It is kept beside the samples, the same for a person in every copy."""
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=torch.int64)
