"""What a client refuses in a secure sum, whatever the server says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedblur.core.errors import PrivacyError
from fedblur.flower.secure_sum_client import Member

BITS = 16


def begun(count: int = 4, least: int = 3) -> dict[int, Member]:
    return {number: Member.begin(1, 5, least) for number in range(count)}


def dealt(members: dict[int, Member]) -> tuple[dict[int, Member], dict[int, list[bytes]]]:
    told = (list(members), [m.mask_public for m in members.values()], [m.seal_public for m in members.values()])
    after, sealed = {}, {}
    for number, member in members.items():
        after[number], said = member.deal(number, *told)
        sealed[number] = said["sealed"]
    return after, sealed


def boxes(sealed: dict[int, list[bytes]], number: int, dealers: list[int]) -> list[bytes]:
    return [sealed[d][[n for n in sealed if n != d].index(number)] for d in dealers]


def masked(count: int = 4, least: int = 3) -> dict[int, Member]:
    members, sealed = dealt(begun(count, least))
    after = {}
    for number, member in members.items():
        others = [n for n in members if n != number]
        ready = member.receive(others, boxes(sealed, number, others))
        after[number], _ = ready.mask(np.zeros(10, dtype=np.uint32), BITS)
    return after


def test_unmask__never_both_shares_of_one_member() -> None:
    member = masked()[0]
    with pytest.raises(PrivacyError, match="alive and dropped"):
        member.unmask([0, 1, 2, 3], [3])
    with pytest.raises(PrivacyError, match="not those whose masks"):
        member.unmask([0, 1, 2, 3, 3], [])
    after, said = member.unmask([0, 1, 2], [3])
    assert (len(said["seeds"]), len(said["keys"])) == (3, 1)
    with pytest.raises(PrivacyError, match="came after unmask"):  # a second question would be for the other share
        after.unmask([0, 1, 3], [2])


@pytest.mark.parametrize(
    ("alive", "dropped", "why"),
    [
        ([0, 1], [2, 3], "fewer than the 3"),
        ([0, 1, 2], [], "not those whose masks"),
        ([1, 2, 3], [0], "us among them"),
        ([0, 1, 2, 9], [3], "not those whose masks"),
    ],
)
def test_unmask__refuses_groups_that_are_small_or_made_up(alive: list[int], dropped: list[int], why: str) -> None:
    with pytest.raises(PrivacyError, match=why):
        masked()[0].unmask(alive, dropped)


def test_unmask__too_few_for_the_noise_are_refused_though_the_threshold_would_do() -> None:
    with pytest.raises(PrivacyError, match="fewer than the 5"):
        masked(count=5, least=5)[0].unmask([0, 1, 2, 3], [4])


def test_mask__only_once() -> None:
    members, sealed = dealt(begun())
    ready = members[0].receive([1, 2, 3], boxes(sealed, 0, [1, 2, 3]))
    spent, _ = ready.mask(np.zeros(10, dtype=np.uint32), BITS)
    with pytest.raises(PrivacyError, match="nothing to mask with"):
        spent.mask(np.zeros(10, dtype=np.uint32), BITS)
    with pytest.raises(PrivacyError, match="received before"):
        spent.receive([1, 2], boxes(sealed, 0, [1, 2]))
    assert spent.mask_private == spent.seal_private == spent.seed == b""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"members": [0, 1]}, "two public keys|fewer"),
        ({"members": [0, 1, 2, 2]}, "each member once"),
        ({"members": [1, 2, 3, 4]}, "us among them"),
        ({"swap": True}, "not ours"),
        ({"twin": True}, "same public key"),
    ],
)
def test_deal__refuses_a_group_that_is_not_what_it_seems(change: dict[str, Any], why: str) -> None:
    members = begun()
    masks, seals = [m.mask_public for m in members.values()], [m.seal_public for m in members.values()]
    if "swap" in change:
        masks[0], masks[1] = masks[1], masks[0]
    if "twin" in change:
        masks[2] = masks[1]
    with pytest.raises(PrivacyError, match=why):
        members[0].deal(0, change.get("members", [0, 1, 2, 3]), masks, seals)


def test_deal__too_few_members_for_the_noise() -> None:
    members = begun(count=2)
    publics = [m.mask_public for m in members.values()], [m.seal_public for m in members.values()]
    with pytest.raises(PrivacyError, match="fewer than the 3"):
        members[0].deal(0, [0, 1], *publics)


def test_receive__refuses_shares_of_others_and_of_other_rounds() -> None:
    members, sealed = dealt(begun())
    with pytest.raises(PrivacyError, match="does not open"):
        members[0].receive([1, 2, 3], boxes(sealed, 1, [2, 3, 0]))  # sealed for member 1
    with pytest.raises(PrivacyError, match="another round"):
        replace(members[0], round_=6).receive([1, 2, 3], boxes(sealed, 0, [1, 2, 3]))
    with pytest.raises(PrivacyError, match="not a member"):
        members[0].receive([1, 2, 9], boxes(sealed, 0, [1, 2, 3]))
    with pytest.raises(PrivacyError, match="fewer than the 3"):
        members[0].receive([1], boxes(sealed, 0, [1]))


def test_member__does_not_print_its_secrets() -> None:
    member = dealt(begun())[0][0]
    assert "PRIVATE" not in repr(member)
    assert repr(member.seed) not in repr(member)
