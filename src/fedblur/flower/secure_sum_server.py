"""The server's side of the secure sum: who is in, who dropped out, and what is left when the masks are off. No torch.

    U1 gave keys ⊇ U2 gave shares ⊇ U3 gave masked vectors ⊇ U4 gave what unmasks

A round in which U1, U2 or U3 has fewer members than the noise shares are sized for is aborted before anything is
unmasked (invariant 8). `pay` writes the ledger's row just before: from there on the sum is seen by the server.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key, public_key_to_bytes

from fedblur.core.errors import RoundAborted
from fedblur.flower import masking
from fedblur.flower.masking import Residues

Answers = dict[int, dict[str, Any]]
Ask = Callable[[str, Mapping[int, Mapping[str, Any]]], Answers]  # question, what each number is told -> valid answers
_TRIES = 200  # groups of shares that are put together before a secret is given up


@dataclass
class SecureRound:
    """One round of the protocol, as the server drives it."""

    run: int
    round_: int
    bits: int
    width: int
    min_cohort: int
    ask: Ask
    pay: Callable[[], None]
    members: list[int] = field(default_factory=list)  # U1
    publics: dict[int, bytes] = field(default_factory=dict)  # of masks
    commitments: dict[int, bytes] = field(default_factory=dict)

    def total(self, sampled: list[int]) -> tuple[Residues, int]:
        """Return the sum of the survivors' vectors modulo 2^b, and how many they are."""
        sealed = self._deal(sampled)
        masked = self._masked(sealed)
        alive, dropped = sorted(masked), sorted(set(sealed) - set(masked))
        self.pay()
        answers = self.ask("unmask", {number: {"alive": alive, "dropped": dropped} for number in alive})
        self._demand(answers, "unmask", masking.threshold(len(self.members)))
        total = np.zeros(self.width, dtype=np.uint32)
        for vector in masked.values():
            total += vector
        for number in alive:
            total -= self._own_mask(number, _shares(answers, "seeds", alive.index(number), len(alive)))
        for number in dropped:
            total -= self._left_over(number, alive, _shares(answers, "keys", dropped.index(number), len(dropped)))
        return masking.reduce(total, self.bits), len(alive)

    def _deal(self, sampled: list[int]) -> dict[int, dict[int, bytes]]:
        """Ask U1 and U2: keys, then each dealer's sealed shares by the member that they are for."""
        keys = self.ask("keys", {number: {} for number in sampled})
        keys = {number: answer for number, answer in keys.items() if all(map(_is_key, answer.values()))}
        self._demand(keys, "keys")
        self.members = members = sorted(keys)
        self.publics = {number: keys[number]["mask"] for number in members}
        told = {
            "members": members,
            "mask_publics": [keys[number]["mask"] for number in members],
            "seal_publics": [keys[number]["seal"] for number in members],
        }
        dealt = self.ask("shares", {number: {"number": number, **told} for number in members})
        dealt = {number: answer for number, answer in dealt.items() if len(answer["sealed"]) == len(members) - 1}
        self._demand(dealt, "shares", masking.threshold(len(members)))
        self.commitments = {number: answer["commitment"] for number, answer in dealt.items()}
        return {
            number: dict(zip((other for other in members if other != number), answer["sealed"], strict=True))
            for number, answer in dealt.items()
        }

    def _masked(self, sealed: dict[int, dict[int, bytes]]) -> dict[int, Residues]:
        """Ask U3: every dealer gets what the other dealers sealed for it, and answers with its masked vector."""
        dealers = sorted(sealed)
        told = {}
        for number in dealers:
            others = [other for other in dealers if other != number]
            told[number] = {"dealers": others, "sealed": [sealed[other][number] for other in others]}
        answers = self.ask("masked", told)
        self._demand(answers, "masked", masking.threshold(len(self.members)))
        return {number: masking.unpack(answer["array"], self.bits) for number, answer in answers.items()}

    def _own_mask(self, number: int, shares: list[bytes]) -> Residues:
        here = masking.session(self.run, self.round_)

        def right(seed: bytes) -> bool:
            return masking.commitment(seed, here) == self.commitments[number]

        seed = self._secret(shares, right)
        return masking.own_mask(seed, here, number, self.bits, self.width)

    def _left_over(self, number: int, alive: list[int], shares: list[bytes]) -> Residues:
        """Return what those who are alive added for their pairs with one that dropped out."""

        def right(key: bytes) -> bool:
            return public_key_to_bytes(bytes_to_private_key(key).public_key()) == self.publics[number]

        key, here = self._secret(shares, right), masking.session(self.run, self.round_)
        total = np.zeros(self.width, dtype=np.uint32)
        for other in alive:
            secret = masking.agree(key, self.publics[other])
            total += masking.pair_mask(secret, here, other, number, self.bits, self.width)
        return total

    def _secret(self, shares: list[bytes], right: Callable[[bytes], bool]) -> bytes:
        """Recover a secret from enough of its shares. A bad share spoils only the groups that it is in."""
        limit = masking.threshold(len(self.members))
        for group in _groups(shares, limit):
            try:
                secret = combine_shares(group)
                if right(secret):
                    return secret
            except Exception:  # whatever bytes of a member's own choice raise, as shares or as a key
                continue
        raise RoundAborted(f"round {self.round_}: the shares of a member do not fit together; round aborted")

    def _demand(self, answers: Mapping[int, object], stage: str, least: int = 1) -> None:
        least = max(least, self.min_cohort if stage != "unmask" else 1)
        if len(answers) < least:
            raise RoundAborted(f"{len(answers)} nodes of the {least} that are needed answered ({stage}); round aborted")


def _groups(shares: list[bytes], size: int) -> Iterator[list[bytes]]:
    """Yield the first group, then random ones: in order, the first share would be in more groups than are tried."""
    if len(shares) >= size:
        yield shares[:size]
    if len(shares) > size:
        for _ in range(_TRIES):
            yield secrets.SystemRandom().sample(shares, size)


def _is_key(data: bytes) -> bool:
    """Check a key: a hostile one would make honest members refuse."""
    try:
        return isinstance(bytes_to_public_key(data).curve, SECP384R1)
    except Exception:  # whatever bytes of a member's own choice raise
        return False


def _shares(answers: Answers, name: str, place: int, count: int) -> list[bytes]:
    """Return everyone's share of one secret; an answer with another number of shares is left out."""
    return [answer[name][place] for answer in answers.values() if len(answer[name]) == count]
