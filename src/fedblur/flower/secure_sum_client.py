"""A client's side of the secure sum: four questions of the server, each answered once a round, in order. No torch.

    keys     two fresh public keys: one for masks, one for sealing
    shares   Shamir shares of the own secrets, sealed for each of the others
    masked   the own vector under its masks
    unmask   for everyone else EITHER the share of its own mask's seed OR the share of its pair key, never both

What the server says is not believed where privacy hangs on it: groups below `min_cohort` or the threshold, two faces
of one member, a round that was already answered, foreign keys in place of ours are refused, and nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cryptography.fernet import InvalidToken
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat, share_keys_plaintext_separate
from flwr.supercore.primitives.asymmetric import generate_key_pairs, private_key_to_bytes, public_key_to_bytes

from fedblur.core.errors import PrivacyError
from fedblur.flower import masking
from fedblur.flower.masking import Residues


@dataclass(frozen=True)
class Member:
    """A client in one round. Its fields are plain values, kept on the client's machine between two questions."""

    run: int
    round_: int
    min_cohort: int  # m, from the client's own configuration
    stage: str = "keys"  # the last question that was answered
    number: int = -1
    mask_private: bytes = b""
    seal_private: bytes = b""
    mask_public: bytes = b""
    seal_public: bytes = b""
    seed: bytes = b""
    members: list[int] = field(default_factory=list)  # U1: who gave keys
    mask_publics: list[bytes] = field(default_factory=list)
    seal_publics: list[bytes] = field(default_factory=list)
    dealers: list[int] = field(default_factory=list)  # U2: who gave shares
    seed_shares: list[bytes] = field(default_factory=list)  # of the dealers, in their order
    key_shares: list[bytes] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Member(round {self.round_}, {self.stage})"  # never a secret

    @classmethod
    def begin(cls, run: int, round_: int, min_cohort: int) -> Member:
        """Make fresh keys for this round."""
        (mask, mask_public), (seal, seal_public) = generate_key_pairs(), generate_key_pairs()
        return cls(
            run,
            round_,
            min_cohort,
            mask_private=private_key_to_bytes(mask),
            seal_private=private_key_to_bytes(seal),
            mask_public=public_key_to_bytes(mask_public),
            seal_public=public_key_to_bytes(seal_public),
        )

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Member:
        return cls(**dict(values))

    def save(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def session(self) -> bytes:
        return masking.session(self.run, self.round_)

    def deal(
        self, number: int, members: list[int], mask_publics: list[bytes], seal_publics: list[bytes]
    ) -> tuple[Member, dict[str, Any]]:
        """Share the own secrets among those who gave keys. The sealed shares are in the order of the other members."""
        demand(self.stage == "keys", f"members came after {self.stage}")
        self._demand_group(members, number)
        publics = [*mask_publics, *seal_publics]
        demand(len(publics) == 2 * len(members), "each member needs two public keys")
        demand(len(set(publics)) == len(publics), "two members have the same public key")
        place = members.index(number)
        own = (mask_publics[place], seal_publics[place]) == (self.mask_public, self.seal_public)
        demand(own, "the keys beside our number are not ours")
        seed, limit = os.urandom(32), masking.threshold(len(members))
        seeds = create_shares(seed, limit, len(members))
        keys = create_shares(self.mask_private, limit, len(members))
        sealed = [
            encrypt(
                masking.agree(self.seal_private, public),
                self.session + share_keys_plaintext_concat(number, other, seeds[i], keys[i]),
            )
            for i, (other, public) in enumerate(zip(members, seal_publics, strict=True))
            if other != number
        ]
        after = replace(
            self, stage="shares", number=number, seed=seed, members=members, mask_publics=mask_publics,
            seal_publics=seal_publics, dealers=[number], seed_shares=[seeds[place]], key_shares=[keys[place]],
        )  # fmt: skip
        return after, {"sealed": sealed, "commitment": masking.commitment(seed, self.session)}

    def receive(self, dealers: list[int], sealed: list[bytes]) -> Member:
        """Open what the others dealt to us: from here on it is fixed whose masks are in the sum."""
        demand(self.stage == "shares" and len(self.dealers) == 1, "shares were received before")
        demand(len(dealers) == len(sealed), "each dealer needs one sealed share")
        demand(set(dealers) <= set(self.members) - {self.number}, "a dealer is not a member")
        seeds, keys = [*self.seed_shares], [*self.key_shares]
        for dealer, box in zip(dealers, sealed, strict=True):
            public = self.seal_publics[self.members.index(dealer)]
            try:
                text = decrypt(masking.agree(self.seal_private, public), box)
            except InvalidToken:
                raise PrivacyError("a sealed share does not open") from None
            demand(text.startswith(self.session), "a sealed share belongs to another round")
            source, target, seed, key = share_keys_plaintext_separate(text[len(self.session) :])
            demand((source, target) == (dealer, self.number), "a sealed share is for someone else")
            seeds.append(seed)
            keys.append(key)
        after = replace(self, dealers=[self.number, *dealers], seed_shares=seeds, key_shares=keys)
        after._demand_group(after.dealers, self.number)
        return after

    def mask(self, vector: Residues, bits: int) -> tuple[Member, Residues]:
        """Mask the member's own vector. Only once: two vectors under one mask would show their difference."""
        demand(self.stage == "shares" and len(self.dealers) > 1, "there is nothing to mask with, or it was used")
        here, count = self.session, len(vector)
        total = vector + masking.own_mask(self.seed, here, self.number, bits, count)
        publics = dict(zip(self.members, self.mask_publics, strict=True))
        for other in self.dealers:
            if other != self.number:
                secret = masking.agree(self.mask_private, publics[other])
                total += masking.pair_mask(secret, here, self.number, other, bits, count)
        spent = replace(self, stage="masked", mask_private=b"", seal_private=b"", seed=b"")
        return spent, masking.reduce(total, bits)

    def unmask(self, alive: list[int], dropped: list[int]) -> tuple[Member, dict[str, Any]]:
        """Return the shares that take the masks off the sum of those who are alive, and of nothing smaller."""
        demand(self.stage == "masked", f"unmask came after {self.stage}")
        demand(not set(alive) & set(dropped), "a member cannot be alive and dropped: both shares would open its vector")
        demand(sorted([*alive, *dropped]) == sorted(self.dealers), "alive and dropped are not those whose masks are in")
        self._demand_group(alive, self.number)
        seeds = dict(zip(self.dealers, self.seed_shares, strict=True))
        keys = dict(zip(self.dealers, self.key_shares, strict=True))
        shares = {"seeds": [seeds[number] for number in alive], "keys": [keys[number] for number in dropped]}
        return Member(self.run, self.round_, self.min_cohort, stage="unmask"), shares  # all secrets are forgotten

    def _demand_group(self, group: list[int], number: int) -> None:
        """Refuse a group too small to hide in, or to carry the noise."""
        demand(len(set(group)) == len(group) and number in group, "a group names each member once, and us among them")
        size = len(self.members or group)
        least = max(self.min_cohort, masking.threshold(size))
        demand(len(group) >= least, f"{len(group)} members of {size} are fewer than the {least} that we hide among")


def demand(holds: bool, otherwise: str) -> None:
    """Refuse what breaks a rule of the protocol."""
    if not holds:
        raise PrivacyError(f"refused: {otherwise}")


def numbers(values: Iterable[int]) -> list[int]:
    """Return members' numbers as plain integers; refuse one that is out of range."""
    plain = [int(value) for value in values]
    demand(all(0 <= value < 2**31 for value in plain), "a member's number is out of range")
    return plain
