"""Masks: uniform, cancelling, bound to their round; and why Flower's own are not used."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedblur.flower import masking
from fedblur.flower.secure_sum_client import Member

HERE = masking.session(1, 2)


@pytest.mark.parametrize("bits", [2, 8, 16, 20, 24])
def test_masks__are_uniform_over_all_residues(bits: int) -> None:
    values = masking.stream(b"s" * 32, HERE, bits, 200_000)
    assert int(values.max()) < 2**bits
    cells = min(2**bits, 64)
    counts = np.bincount(values // (2**bits // cells), minlength=cells)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_masks__of_other_secrets_rounds_and_members_are_unrelated() -> None:
    one = masking.own_mask(b"a" * 32, HERE, 1, 16, 5000)
    others = [
        masking.own_mask(b"b" * 32, HERE, 1, 16, 5000),
        masking.own_mask(b"a" * 32, masking.session(1, 3), 1, 16, 5000),
        masking.own_mask(b"a" * 32, masking.session(2, 2), 1, 16, 5000),
        masking.own_mask(b"a" * 32, HERE, 2, 16, 5000),
    ]
    assert np.array_equal(one, masking.own_mask(b"a" * 32, HERE, 1, 16, 5000))
    for other in others:
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.07


def test_masks__of_a_pair_cancel() -> None:
    a, b = Member.begin(1, 2, 2), Member.begin(1, 2, 2)
    ours = masking.pair_mask(masking.agree(a.mask_private, b.mask_public), HERE, 3, 9, 20, 1000)
    theirs = masking.pair_mask(masking.agree(b.mask_private, a.mask_public), HERE, 9, 3, 20, 1000)
    assert not masking.reduce(ours + theirs, 20).any()
    assert masking.reduce(ours, 20).any()


@given(st.lists(st.integers(0, 2**24 - 1), max_size=50), st.integers(2, 24))
def test_pack__keeps_every_residue(values: list[int], bits: int) -> None:
    residues = masking.reduce(np.array(values, dtype=np.uint32), bits)
    data = masking.pack(residues, bits)
    assert len(data) == len(values) * -(-bits // 8)
    assert np.array_equal(masking.unpack(data, bits), residues)


def test_threshold__no_two_groups_of_it_are_disjoint() -> None:
    for members in range(2, 200):
        assert members / 2 < masking.threshold(members) <= members


def test_flower__its_own_masks_are_neither_uniform_nor_secret() -> None:
    """Why they are not used: the largest residue never comes, and a seed counts for 32 bits of it."""
    (values,) = pseudo_rand_gen(b"s" * 32, 4, [(100_000,)])
    assert set(values) == {0, 1, 2}
    one, other = b"\x01\x02\x03\x04" + bytes(28), bytes(28) + b"\x01\x02\x03\x04"
    assert np.array_equal(pseudo_rand_gen(one, 2**16, [(99,)])[0], pseudo_rand_gen(other, 2**16, [(99,)])[0])
