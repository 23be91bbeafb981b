"""Decompression with a limit: a small file can stand for any number of bytes. In: a stream, a limit. Out: its bytes."""

from __future__ import annotations

import io
import lzma
from typing import Protocol

_CHUNK = 2**20
_WORKSPACE = 2**27  # bytes that xz may take for its dictionary, which a file chooses; ours needs 2 MiB


class Readable(Protocol):
    """Something that gives bytes, as many as one wants at a time."""

    def read(self, size: int, /) -> bytes: ...


def read_at_most(stream: Readable, limit: int) -> bytes:
    """Return all that is left of the stream; more than `limit` bytes are a ValueError, and are not decompressed."""
    content = io.BytesIO()
    while chunk := stream.read(min(_CHUNK, limit + 1 - content.tell())):
        content.write(chunk)
        if content.tell() > limit:
            raise ValueError(f"it decompresses to more than {limit:,} bytes")
    return content.getvalue()


def count_at_most(stream: Readable, limit: int) -> int:
    """Return how many bytes are left of the stream without keeping them; more than `limit` are a ValueError."""
    count = 0
    while chunk := stream.read(_CHUNK):
        count += len(chunk)
        if count > limit:
            raise ValueError(f"it decompresses to more than {limit:,} bytes")
    return count


def unxz(data: bytes, limit: int) -> bytes:
    """Return what an xz file of one stream holds; more than `limit` bytes are a ValueError."""
    decompressor = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_WORKSPACE)
    content = decompressor.decompress(data, max_length=limit + 1)
    if len(content) > limit:
        raise ValueError(f"it decompresses to more than {limit:,} bytes")
    if not decompressor.eof:
        raise EOFError("it is cut short")
    return content
