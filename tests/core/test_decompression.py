"""Decompression stops at its limit, whatever the file says."""

from __future__ import annotations

import gzip
import io
import lzma
import tracemalloc

import pytest

from fedblur.core.decompression import count_at_most, read_at_most, unxz

SIZE = 2**26
BOMB = gzip.compress(bytes(SIZE), 1)


def test_read__what_is_within_the_limit_is_whole() -> None:
    assert read_at_most(io.BytesIO(b"abc"), 3) == b"abc"
    assert read_at_most(gzip.GzipFile(fileobj=io.BytesIO(BOMB)), SIZE) == bytes(SIZE)
    assert count_at_most(gzip.GzipFile(fileobj=io.BytesIO(BOMB)), SIZE) == SIZE
    assert unxz(lzma.compress(b"abc"), 3) == b"abc"


@pytest.mark.parametrize("limit", [0, 1, 2**20, 2**22, SIZE - 1])
def test_read__more_than_the_limit_is_refused_and_not_held(limit: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"more than {limit:,} bytes"):
            read_at_most(gzip.GzipFile(fileobj=io.BytesIO(BOMB)), limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * limit + 2**23


def test_count__keeps_nothing() -> None:
    with pytest.raises(ValueError, match="more than 3 bytes"):
        count_at_most(io.BytesIO(b"abcd"), 3)


def test_unxz__refuses_what_is_large_short_or_wants_much_memory() -> None:
    with pytest.raises(ValueError, match="more than 5 bytes"):
        unxz(lzma.compress(bytes(10**6)), 5)
    with pytest.raises(EOFError):
        unxz(lzma.compress(bytes(range(256)))[:-20], 1000)
    greedy = lzma.compress(b"x", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 2**30}])
    with pytest.raises(lzma.LZMAError):
        unxz(greedy, 1000)
