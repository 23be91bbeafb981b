"""Connections of strangers: what each may take up before anyone knows who it is, and whose place a newcomer gets.

TLS runs over the bare socket, in steps of 16 KiB: asyncio's own keeps 256 KiB for each connection, and hands over
whatever has come in. A connection that waits (for the handshake, for headers, for the next request, for its turn) can
lose its place to a newcomer: first one of the address that has most of them, and there the one that has waited longest.
So nobody holds places by silence, and an address with few connections does not lose them to one with many.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_PIECE = 2**14  # bytes: a record of TLS


class Connection:
    """A socket with TLS on the server's side. It buffers two records at most."""

    def __init__(self, sock: socket.socket, address: str, context: ssl.SSLContext) -> None:
        self.sock, self.address = sock, address
        self.known = False  # the SuperLink accepted its last request
        self.task: asyncio.Task[None] | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    def close(self) -> None:
        """Close the socket and let go of TLS now: its memory is not Python's, which would be in no hurry."""
        self.sock.close()
        self.task = None
        del self._tls, self._incoming, self._outgoing

    async def handshake(self) -> None:
        """Wait until TLS is set up."""
        await self._step(self._tls.do_handshake)

    async def read(self) -> bytes:
        """Return at most 16 KiB, or nothing at the end."""
        try:
            return await self._step(lambda: self._tls.read(_PIECE))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    async def write(self, data: bytes) -> None:
        """Send all of it."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            await self._step(functools.partial(self._tls.write, view[start : start + _PIECE]))

    async def drain(self) -> None:
        """Say that nothing more is sent, and pass over what comes: a reset could take the answer with it."""
        self.sock.shutdown(socket.SHUT_WR)
        while await asyncio.get_running_loop().sock_recv(self.sock, _PIECE):
            await asyncio.sleep(0.05)  # no hurry: who goes on sending takes nobody's turn

    async def _step(self, step: Callable[[], _T]) -> _T:
        while True:
            await asyncio.sleep(0)  # where the peer is quick, nothing below waits: one piece, then the others' turn
            try:
                result = step()
            except ssl.SSLWantReadError:
                await self._flush()
                data = await asyncio.get_running_loop().sock_recv(self.sock, _PIECE)
                if data:
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
                continue
            except ssl.SSLError:
                await self._flush()  # the alert that says why
                raise
            await self._flush()
            return result

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await asyncio.get_running_loop().sock_sendall(self.sock, self._outgoing.read())


class Places:
    """The connections that are open: a limit for all of them, and one for each address."""

    def __init__(self, total: int, per_address: int, turns: int) -> None:
        self.total, self.per_address, self._turns = total, per_address, turns
        self.open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # for their peer; the one that has waited longest is first
        self._of: dict[str, int] = {}
        self._turn: dict[str, asyncio.Semaphore] = {}

    def admit(self, new: Connection) -> bool:
        """Give the newcomer a place, if need be that of one that waits; return whether there was one."""
        own = self._of.get(new.address, 0) >= self.per_address
        if own or len(self.open) >= self.total:
            loser = self._loser(new.address if own else max(self._of, key=self._of.__getitem__), own)
            if loser is None:
                return False
            self.release(loser)
            if loser.task is not None:
                loser.task.cancel()
        self.open.add(new)
        self._of[new.address] = self._of.get(new.address, 0) + 1
        self.waits(new)
        return True

    def _loser(self, address: str, only: bool) -> Connection | None:
        """Return who waits and loses its place: a stranger before a node, of this address if there is one."""
        here = [each for each in self._waiting if each.address == address]
        others = [] if only else [each for each in self._waiting if not each.known]
        return next((each for each in [*here, *others] if not each.known), here[0] if here else None)

    def waits(self, connection: Connection) -> None:
        """Note that it waits from now on, for its peer or for its turn: it may lose its place."""
        self._waiting.pop(connection, None)
        if connection in self.open:
            self._waiting[connection] = None

    def works(self, connection: Connection) -> None:
        """Note that it does not wait: it keeps its place."""
        self._waiting.pop(connection, None)

    def turn(self, connection: Connection) -> asyncio.Semaphore:
        """Return what lets a few requests of this address through at a time, so that others get their turn."""
        return self._turn.setdefault(connection.address, asyncio.Semaphore(self._turns))

    def release(self, connection: Connection) -> None:
        """Take back its place; a second time changes nothing."""
        if connection not in self.open:
            return
        self.open.remove(connection)
        self._waiting.pop(connection, None)
        self._of[connection.address] -= 1
        if not self._of[connection.address]:
            del self._of[connection.address]
            self._turn.pop(connection.address, None)

    def idle(self) -> list[Connection]:
        """Return those that wait."""
        return list(self._waiting)


def address_of(peer: str) -> str:
    """Return what counts as one address: of IPv6 the first 64 bits, which one household or machine has to itself."""
    address = ipaddress.ip_address(peer.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
