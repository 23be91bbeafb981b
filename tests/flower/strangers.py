"""Strangers who attack a gateway on loopback: `python -m tests.flower.strangers PORT SECRETS COUNT ADDRESS...`.

A sixth each sends nothing, sends its headers slowly, sends headers without end, sends a recorded request again and
again, sends a body in chunks of one byte, and keeps back the end of a long body. Each comes back when it is ended, at
most sixty times, and nothing goes on for longer than four minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
from pathlib import Path

from fedblur.flower.connections import Connection

KINDS = ("silent", "slow", "huge", "replay", "chunks", "long")
HEAD = b"POST /v1/fleet/x HTTP/1.1\r\nhost: x\r\n"


class Stranger(Connection):
    """The client's side of TLS over a bare socket: a thousand of asyncio's own would take 256 MB."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self.sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")


async def hostile(kind: str, port: int, own: str, context: ssl.SSLContext) -> None:
    """One connection."""
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.bind((own, 0))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", port))
        if kind == "silent":
            await loop.sock_recv(sock, 1)
            return
        stranger = Stranger(sock, context)
        await stranger.handshake()
        if kind == "slow":
            await stranger.write(HEAD)
            for _ in range(100):
                await stranger.write(b"x: y\r\n")
                await asyncio.sleep(1)
        elif kind == "huge":
            await stranger.write(HEAD + b"x: ")
            for _ in range(256):  # 16 MiB
                await stranger.write(b"a" * 2**16)
        elif kind == "replay":
            recorded = HEAD + b"flwr-public-key: stolen\r\ncontent-length: 9\r\n\r\nsomething"
            await stranger.write(recorded)
            while await stranger.read():
                await stranger.write(recorded)
        elif kind == "chunks":
            await stranger.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(2**10):
                await stranger.write(b"1\r\nx\r\n" * 2700)
        elif kind == "long":
            await stranger.write(HEAD + b"content-length: 60000000\r\n\r\n")
            for _ in range(900):
                await stranger.write(b"x" * 2**16)
        await stranger.read()


async def keep_up(kind: str, port: int, own: str, context: ssl.SSLContext) -> None:
    for _ in range(60):
        with contextlib.suppress(OSError):
            await hostile(kind, port, own, context)
        await asyncio.sleep(2)


async def attack(port: int, secrets: Path, count: int, homes: list[str]) -> None:
    context = ssl.create_default_context(cafile=str(secrets / "ca.crt"))
    crowd = [(KINDS[n % len(KINDS)], port, homes[n // len(KINDS) % len(homes)]) for n in range(count)]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(240):
            await asyncio.gather(*(keep_up(*each, context) for each in crowd))


if __name__ == "__main__":
    asyncio.run(attack(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
