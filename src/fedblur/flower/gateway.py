"""The door of a federation: passes nodes' requests on to the SuperLink, and nothing else.

Flower 1.41 serves three interfaces on one port: for nodes (which authenticate), for starting runs and registering nodes
(no login), and for its own processes. Whoever reaches that port can run code on every node. So the SuperLink listens on
loopback, and other machines reach only this: TLS, paths below /v1/fleet/, bodies up to a limit. Who sends them is known
only to the SuperLink, so all that a stranger can take up here is limited too: connections, headers, memory, and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import re
import signal
import socket
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path

import h11
import httpx

from fedblur.core.errors import ConfigError, RunError
from fedblur.flower.connections import Connection, Places, address_of

_PATH = re.compile(rb"/v1/fleet/[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host", b"content-length"}
_NOT_ON = _HOP | {b"expect"}
_NOT_BACK = _HOP | {b"content-encoding"}
_KEY = b"flwr-public-key"  # a node's, which each of its requests names
_AT_ONCE = 32  # connections that are accepted before the others get on


@dataclass(frozen=True)
class Limits:
    """Limits of what one connection, one address and all strangers together may take up."""

    body: int = 64 * 2**20  # bytes of a request
    strange: int = 2**14  # bytes of a request of whom the SuperLink has not accepted yet: nodes begin with small ones
    bodies: int | None = None  # of all requests together; 16 of the largest unless given
    connections: int = 1000
    per_address: int = 256  # nodes behind one router share an address, and have one or two connections each
    head: int = 2**14  # bytes of a request's line and headers; Flower's take under 2 KiB
    headers: int = 64
    turns: int = 8  # requests of one address that the SuperLink is asked at a time; the others wait
    handshake: float = 10.0  # seconds from the connection to the end of the TLS handshake
    idle: float = 10.0  # to the first byte of a request
    heading: float = 10.0  # from there to the end of its headers
    penalty: float = 5.0  # after a request that the SuperLink refuses, before the connection's next one is read
    pause: float = 20.0  # between two parts of a body
    whole: float = 300.0  # for a body: Flower's largest part, 20 MiB, at 0.6 megabits a second


class _Refused(Exception):
    """A request that gets this status and nothing else; the connection ends with it."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Gateway:
    """The door. `inner` reaches the SuperLink."""

    def __init__(self, inner: httpx.AsyncClient, context: ssl.SSLContext, limits: Limits) -> None:
        self.inner, self.context, self.limits = inner, context, limits
        self.places = Places(limits.connections, limits.per_address, limits.turns)
        self.together = 16 * limits.body if limits.bodies is None else limits.bodies
        self.held = 0  # bytes of bodies, of all that are being read or passed on
        self.accepted: set[tuple[str, bytes]] = set()  # addresses, and keys there, whose requests the SuperLink accepts

    async def listen(self, listener: socket.socket) -> None:
        """Accept connections until this is cancelled."""
        loop = asyncio.get_running_loop()
        for number in itertools.count():
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)  # accepting does not wait where a connection is there already
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError:  # the peer is gone already, or this process has no file left
                await asyncio.sleep(0.05)
                continue
            connection = Connection(sock, address_of(peer[0]), self.context)
            if self.places.admit(connection):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.task = asyncio.create_task(self._keep(connection))
                connection.task.add_done_callback(functools.partial(self._end, connection))
            else:
                connection.close()

    async def close(self, seconds: float = 5.0) -> None:
        """End connections; those whose request is with the SuperLink have a moment for its answer."""
        for connection in self.places.idle():
            if connection.task is not None:
                connection.task.cancel()
        tasks = [connection.task for connection in self.places.open if connection.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()

    async def _keep(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, TimeoutError):  # TLS that is none, a peer that is gone or too slow
            async with asyncio.timeout(self.limits.handshake):
                await connection.handshake()
            await self._talk(connection)

    def _end(self, connection: Connection, task: asyncio.Task[None]) -> None:
        """Close it, also if it lost its place to a newcomer before it had its first turn."""
        self.places.release(connection)
        connection.close()

    async def _talk(self, connection: Connection) -> None:
        """Answer one request after the other."""
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=self.limits.head)
        while True:
            self.places.waits(connection)
            try:
                request = await self._request(http, connection)
                if request is None:
                    return
                answer = await self._answered(request, http, connection)
            except _Refused as refused:
                await self._refuse(http, connection, refused.status)
                return
            except h11.RemoteProtocolError as error:
                await self._refuse(http, connection, error.error_status_hint)
                return
            connection.known = answer.is_success
            back = [(name, value) for name, value in answer.headers.raw if name.lower() not in _NOT_BACK]
            async with asyncio.timeout(self.limits.whole):
                await _send(http, connection, answer.status_code, back, answer.content)
            if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                return  # one of the two sides wants no further request
            http.start_next_cycle()
            if answer.is_client_error:  # no node of this federation: who asks again and again waits in between
                self.places.waits(connection)
                await asyncio.sleep(self.limits.penalty)

    async def _request(self, http: h11.Connection, connection: Connection) -> h11.Request | None:
        """Wait for a request's line and headers; None if the peer has gone."""
        if not http.trailing_data[0]:
            async with asyncio.timeout(self.limits.idle):
                http.receive_data(await connection.read())
        async with asyncio.timeout(self.limits.heading):
            event = await _event(http, connection)
        if not isinstance(event, h11.Request):
            return None
        if len(event.headers) > self.limits.headers:
            raise _Refused(431)
        return event

    async def _answered(self, request: h11.Request, http: h11.Connection, connection: Connection) -> httpx.Response:
        """Return what the SuperLink answers."""
        path = request.target.partition(b"?")[0]
        if request.method != b"POST":
            raise _Refused(405)
        if not _PATH.fullmatch(path):
            raise _Refused(404)
        headers = dict(request.headers)
        caller = connection.address, headers.get(_KEY, b"")
        connection.known = connection.known or caller in self.accepted
        self._demand_length(headers, connection)
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.whole):
                await self._body(body, http, connection)
            passed = [(name, value) for name, value in request.headers if name not in _NOT_ON]
            self.places.waits(connection)
            async with self.places.turn(connection):
                self.places.works(connection)
                answer = await self.inner.post(path.decode("ascii"), content=bytes(body), headers=passed)
            if answer.is_success:
                self.accepted.add(caller)
            return answer
        except TimeoutError:
            raise _Refused(408) from None
        except httpx.TransportError:  # the SuperLink is away: nodes try again on this status
            raise _Refused(503) from None
        finally:
            self.held -= len(body)

    def _demand_length(self, headers: dict[bytes, bytes], connection: Connection) -> None:
        """Refuse a body that is too long before it is read. One in chunks has no length, and costs work for each."""
        if b"transfer-encoding" in headers:
            raise _Refused(411)
        length = int(headers.get(b"content-length", b"0"))
        if length > self.limits.body:
            raise _Refused(413)
        if length > self.limits.strange and not connection.known:  # nodes try again on this status
            raise _Refused(503)

    async def _body(self, body: bytearray, http: h11.Connection, connection: Connection) -> None:
        if connection.known:
            self.places.works(connection)
        while True:
            async with asyncio.timeout(self.limits.pause):
                event = await _event(http, connection)
            if not isinstance(event, h11.Data):
                return
            body += event.data
            self.held += len(event.data)
            if self.held > self.together:  # nodes try again on this status
                raise _Refused(503)

    async def _refuse(self, http: h11.Connection, connection: Connection, status: int) -> None:
        self.places.waits(connection)
        async with asyncio.timeout(self.limits.idle):
            if http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                await _send(http, connection, status, [(b"connection", b"close")], b"")
            await connection.drain()


async def _event(http: h11.Connection, connection: Connection) -> object:
    """Return the next event, reading as little as it takes."""
    while True:
        event = http.next_event()
        if event is not h11.NEED_DATA:
            return event
        if http.they_are_waiting_for_100_continue:
            await connection.write(http.send(h11.InformationalResponse(status_code=100, headers=[])))
        http.receive_data(await connection.read())


async def _send(
    http: h11.Connection, connection: Connection, status: int, headers: list[tuple[bytes, bytes]], content: bytes
) -> None:
    headers = [*headers, (b"content-length", str(len(content)).encode())]
    events = [h11.Response(status_code=status, headers=headers), h11.Data(data=content), h11.EndOfMessage()]
    for event in events:
        await connection.write(http.send(event) or b"")


def server_context(secrets: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """Return the server's side of TLS; with `client_ca` it wants a certificate signed by it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # each would cost memory and time, and nodes keep their connections
    context.load_cert_chain(secrets / "server.crt", secrets / "server.key")
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    return context


async def run(gateway: Gateway, listeners: list[socket.socket]) -> None:
    """Accept until SIGINT or SIGTERM, then end the connections and return."""
    stop = asyncio.Event()
    with contextlib.suppress(NotImplementedError):  # on Windows
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, stop.set)
    accepting = [asyncio.create_task(gateway.listen(listener)) for listener in listeners]
    ends = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([ends, *accepting], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # accepting ends only by an error
    finally:
        for task in (ends, *accepting):
            task.cancel()
        for listener in listeners:
            listener.close()
        await gateway.close()


def listening(listen: str) -> list[socket.socket]:
    """Return sockets that listen where `listen` says: an address and a port."""
    host, _, port = listen.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host  # an address of IPv6
    if not host or not port.isdigit():
        raise ConfigError(f"--listen={listen!r} must be an address and a port, like 0.0.0.0:8443 or [::]:8443")
    made: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            made.append(socket.create_server(address[:2], family=family, backlog=1024))
            made[-1].setblocking(False)
    except OSError as error:
        for each in made:
            each.close()
        raise RunError(f"--listen={listen!r} cannot be used: {error.strerror or error}") from None
    return made


def serve(listen: str, superlink: str, secrets: Path, limits: Limits, client_ca: Path | None = None) -> None:
    """Run the door until it is stopped."""
    for name in ("ca.crt", "server.crt", "server.key"):
        if not (secrets / name).is_file():
            raise ConfigError(f"{secrets / name} does not exist; make it with certificates.sh")
    if client_ca is not None and not client_ca.is_file():
        raise ConfigError(f"--client-ca={str(client_ca)!r} is not a file; give the certificate that signs nodes' own")
    listeners = listening(listen)
    _allow_files(2 * limits.connections + 100)
    asyncio.run(_serve(listeners, superlink, secrets, limits, client_ca))


async def _serve(
    listeners: list[socket.socket], superlink: str, secrets: Path, limits: Limits, client_ca: Path | None
) -> None:
    trusted = ssl.create_default_context(cafile=str(secrets / "ca.crt"))
    fresh = httpx.Limits(max_keepalive_connections=0)  # a kept one may be closed as it is used, and a reply be lost
    async with httpx.AsyncClient(
        base_url=f"https://{superlink}", verify=trusted, timeout=600.0, limits=fresh, trust_env=False
    ) as inner:
        await run(Gateway(inner, server_context(secrets, client_ca), limits), listeners)


def _allow_files(wanted: int) -> None:
    """Raise this process's limit of open files: a connection is one, and so is each request to the SuperLink."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
