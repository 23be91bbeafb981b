"""The gateway under strangers: what they take up is limited, and nodes get through while they try.

The guards one by one, in this process; then a real gateway under attack, on loopback only, each attacker bounded in
count and in time. "Not blocked" is counted: a node's request is answered with a patience of ten seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.harness.machines import BIN, ROOT, free_ports
from fedblur.flower.connections import Connection, Places, address_of
from fedblur.flower.gateway import Gateway, Limits, listening, server_context
from tests.flower.door import Door, door, node, secrets, spoken, trusted

PATIENCE = 10  # seconds: how long a node may wait for its answer
HEAD = b"POST /v1/fleet/x HTTP/1.1\r\nhost: x\r\n"
REQUEST = HEAD + b"content-length: 0\r\n\r\n"
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 by itself")


def within(steps: Callable[[Door], Awaitable[Any]], **limits: Any) -> Any:
    async def go() -> Any:
        async with door(Limits(**limits)) as made:
            return await steps(made)

    return asyncio.run(go())


# --- time ---


def test_time__a_connection_without_tls_is_ended() -> None:
    assert within(lambda made: spoken(made.port, b"", tls=False), handshake=0.2) == b""


def test_time__a_handshake_that_trickles_is_ended() -> None:
    assert within(lambda made: spoken(made.port, b"\x16\x03\x01", tls=False), handshake=0.2) == b""


def test_time__a_connection_that_asks_nothing_is_ended() -> None:
    assert within(lambda made: spoken(made.port, b""), idle=0.2) == b""


def test_time__headers_that_do_not_end_are_not_waited_for() -> None:
    assert within(lambda made: spoken(made.port, HEAD), heading=0.2) == b""


def test_time__a_connection_that_asks_no_more_is_ended() -> None:
    said = within(lambda made: spoken(made.port, 2 * REQUEST), idle=0.2)
    assert said.count(b"HTTP/1.1 200 ") == 2


# --- headers ---


@pytest.mark.parametrize("lines", [b"x: " + bytes(40_000).replace(b"\0", b"a"), b"\r\n".join([b"x: a"] * 100)])
def test_headers__that_are_long_or_many_are_refused(lines: bytes) -> None:
    async def steps(made: Door) -> bytes:
        return await spoken(made.port, HEAD + lines + b"\r\n\r\n")

    assert within(steps).startswith(b"HTTP/1.1 431 ")


def test_headers__that_never_end_are_not_kept() -> None:
    """One connection cost 343 MB before there was a limit; here it is refused after 32 KiB."""

    async def steps(made: Door) -> bytes:
        return await spoken(made.port, HEAD + b"x: " + b"a" * 2**24)

    assert within(steps)[:13] in (b"HTTP/1.1 431 ", b"")  # the answer may be lost in what is still being sent


def test_headers__of_flowers_nodes_are_far_below_the_limit() -> None:
    async def steps(made: Door) -> int:
        async with node(made.url) as client:
            headers = {f"flwr-{number}": "x" * 200 for number in range(30)}
            return (await client.post("/v1/fleet/pull-messages", headers=headers)).status_code

    assert within(steps) == 200


@pytest.mark.parametrize("words", [b"\0\0\0\0", b"GET / HTTP/9\r\n\r\n", b"POST /v1/fleet/x HTTP/1.1\r\n\r\n"])
def test_headers__that_are_none_end_the_connection(words: bytes) -> None:
    assert within(lambda made: spoken(made.port, words + b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


# --- bodies ---


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"transfer-encoding: chunked", b"411"),  # a chunk is work, and may be one byte: one connection blocked all
        (b"content-length: 16385", b"503"),  # strangers' bodies took a gigabyte, and nodes got none of it
        (b"content-length: 67108865", b"413"),
    ],
)
def test_bodies__that_are_not_welcome_are_refused_before_they_are_read(head: bytes, status: bytes) -> None:
    said = within(lambda made: spoken(made.port, HEAD + head + b"\r\n\r\n"), whole=300.0, idle=0.2)
    assert said.startswith(b"HTTP/1.1 " + status)


def test_bodies__are_long_only_of_whom_the_superlink_has_accepted() -> None:
    """A node's next connection is known by its key and address; another key there is not."""

    def superlink(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.headers["flwr-public-key"] == "node" else 401)

    async def go() -> list[int]:
        found = []
        async with door(Limits(penalty=0.0), superlink) as made:
            for key, size in (("node", 2**15), ("node", 9), ("node", 2**15), ("other", 9), ("other", 2**15)):
                async with node(made.url) as client:
                    answer = await client.post("/v1/fleet/x", content=bytes(size), headers={"flwr-public-key": key})
                found.append(answer.status_code)
        return found

    assert asyncio.run(go()) == [503, 200, 200, 401, 503]


# --- turns ---


class Turns:
    """Counts how often everything else has had its turn."""

    count = 0

    async def __aenter__(self) -> Turns:
        self.task = asyncio.create_task(self._go())
        return self

    async def __aexit__(self, *reason: object) -> None:
        self.task.cancel()

    async def _go(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.count += 1


def bare(sock: socket.socket, read: Callable[[int], bytes]) -> Connection:
    sock.setblocking(False)
    made = object.__new__(Connection)
    made.sock, made._tls = sock, SimpleNamespace(read=read)  # type: ignore[assignment]
    made._incoming, made._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    return made


def test_turns__a_peer_that_never_pauses_leaves_others_theirs() -> None:
    """Reading does not wait for a quick peer: before, nobody else was served, and no time limit was looked at."""

    def wants_more(size: int) -> bytes:
        steps.append(size)
        if len(steps) < 6:
            raise ssl.SSLWantReadError
        return b"x"

    async def go() -> list[int]:
        found = []
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(bytes(2**17))  # eight pieces
            for read, times in ((lambda size: b"x", 20), (wants_more, 1)):
                connection = bare(ours, read)
                async with Turns() as turns:
                    for _ in range(times):
                        await connection.read()
                    found.append(turns.count)
            theirs.close()
            async with Turns() as turns:
                with contextlib.suppress(OSError):
                    await connection.drain()
                found.append(turns.count)
        return found

    steps: list[int] = []
    some_data, more_data, drained = asyncio.run(go())
    assert some_data > 10
    assert more_data > 3
    assert drained > 0


def test_turns__a_crowd_at_the_door_leaves_others_theirs() -> None:
    async def go() -> int:
        (listener,) = listening("127.0.0.1:0")
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(100):
                _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
                stack.callback(writer.close)
            gateway = Gateway(httpx.AsyncClient(), server_context(secrets()), Limits())
            turns = await stack.enter_async_context(Turns())
            accepting = asyncio.create_task(gateway.listen(listener))
            while len(gateway.places.open) < 100:
                await asyncio.sleep(0)
            seen = turns.count
            accepting.cancel()
            await gateway.close()
            listener.close()
        return seen

    assert asyncio.run(go()) >= 3


# --- places ---


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def full(*who: tuple[str, bool], total: int, per_address: int = 100) -> tuple[Places, list[Any]]:
    places = Places(total, per_address, turns=1)
    made = [Hashable(address=address, known=known, task=None) for address, known in who]
    assert all(places.admit(each) for each in made)
    return places, made


def newcomer(address: str) -> Any:
    return Hashable(address=address, known=False, task=None)


def test_places__the_one_that_waits_longest_goes_first() -> None:
    places, (first, second) = full(("a", False), ("a", False), total=2)
    places.waits(first)  # it has done something since
    assert places.admit(newcomer("a"))
    assert second not in places.open
    assert first in places.open


def test_places__an_address_with_few_keeps_them() -> None:
    places, made = full(*[("node", False), *[("many", False)] * 4], total=5)
    for _ in range(10):
        assert places.admit(newcomer("many"))
        assert places.admit(newcomer("another"))
    assert made[0] in places.open


def test_places__a_node_goes_after_strangers_and_work_is_never_ended() -> None:
    places, (node_, alien, busy) = full(("a", True), ("a", False), ("a", False), total=3)
    places.works(busy)
    assert places.admit(newcomer("a"))
    assert {node_, busy} < places.open
    assert alien not in places.open
    for each in list(places.open):
        places.works(each)
    assert not places.admit(newcomer("b"))


def test_places__an_address_has_its_own_limit() -> None:
    places, made = full(("a", False), ("a", False), ("b", False), total=100, per_address=2)
    assert places.admit(newcomer("a"))
    assert made[0] not in places.open
    assert len(places.open) == 3
    for each in (*made, *made):
        places.release(each)
    assert places.admit(newcomer("b"))


@pytest.mark.parametrize(
    ("peer", "counts_as"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("2001:db8::5", "2001:db8::/64"),
        ("2001:db8::6:1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_places__one_machine_is_one_address(peer: str, counts_as: str) -> None:
    assert address_of(peer) == counts_as


def test_places__silence_holds_none_against_a_newcomer() -> None:
    """Before, as many silent connections as there were places blocked the gateway for good."""

    async def steps(made: Door) -> int:
        silent = [await asyncio.open_connection("127.0.0.1", made.port, ssl=trusted()) for _ in range(4)]
        status = 0
        async with node(made.url) as client:
            with contextlib.suppress(httpx.TransportError):
                status = (await client.post("/v1/fleet/x")).status_code
        assert len(made.gateway.places.open) <= 4
        for _, writer in silent:
            writer.close()
        return status

    assert within(steps, connections=4, idle=300.0) == 200


@linux
def test_places__one_address_leaves_others_their_turn() -> None:
    """Twenty requests of one address hang at the SuperLink; another address gets its answer."""

    async def go() -> tuple[int, int]:
        end, asked = asyncio.Event(), []

        async def superlink(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            if request.headers.get("who") == "many":
                await end.wait()
            return httpx.Response(200)

        async with (
            door(Limits(turns=2), superlink) as made,
            node(made.url) as many,
            node(made.url, own="127.0.0.2") as one,
        ):
            hanging = [asyncio.create_task(many.post("/v1/fleet/x", headers={"who": "many"})) for _ in range(20)]
            await made.until(lambda gateway: len(asked) == 2)
            status = (await one.post("/v1/fleet/x")).status_code
            seen = len(asked)
            end.set()
            assert {(await each).status_code for each in hanging} == {200}
        return status, seen

    assert asyncio.run(go()) == (200, 3)


def test_places__who_is_refused_waits_before_it_may_ask_again() -> None:
    async def go() -> int:
        asked = []

        def superlink(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return httpx.Response(401)

        async with door(Limits(penalty=300.0), superlink) as made:
            hostile = asyncio.create_task(spoken(made.port, 5 * REQUEST))
            await made.until(lambda gateway: bool(asked))
            async with node(made.url) as other:
                assert (await other.post("/v1/fleet/x")).status_code == 401  # the gateway goes on meanwhile
        assert (await hostile).count(b"HTTP/1.1 401 ") == 1
        return len(asked)

    assert asyncio.run(go()) == 2


# --- mutual TLS ---


def test_mutual_tls__admits_only_who_shows_a_certificate_of_the_authority(tmp_path: Path) -> None:
    for name, issuer in (("ca", None), ("node", "ca"), ("own", None)):
        made = [
            "openssl",
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-x509",
            "-days",
            "2",
        ]
        made += ["-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt"]
        made += ["-CA", f"{issuer}.crt", "-CAkey", f"{issuer}.key"] if issuer else []
        subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)

    def with_certificate(name: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(secrets() / "ca.crt"))
        context.load_cert_chain(tmp_path / f"{name}.crt", tmp_path / f"{name}.key")
        return context

    async def go() -> list[int]:
        found, asked = [], []
        async with door(
            Limits(), lambda request: (asked.append(request), httpx.Response(200))[1], tmp_path / "ca.crt"
        ) as made:
            for context in (with_certificate("node"), with_certificate("own"), trusted()):
                async with node(made.url, context) as client:
                    try:
                        found.append((await client.post("/v1/fleet/x")).status_code)
                    except (httpx.TransportError, ssl.SSLError):
                        found.append(0)
        assert len(asked) == 1
        return found

    assert asyncio.run(go()) == [200, 0, 0]


# --- a real gateway, attacked ---


@contextlib.asynccontextmanager
async def attacked(*options: str) -> AsyncIterator[tuple[int, psutil.Process]]:
    """A gateway process and, in this one, what stands for a SuperLink: it accepts whoever has the right key."""

    async def superlink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            good = b"flwr-public-key: good" in await reader.readuntil(b"\r\n\r\n")
            status = b"200 OK" if good else b"401 Unauthorized"
            writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secrets() / "server.crt", secrets() / "server.key")
    server = await asyncio.start_server(superlink, "127.0.0.1", 0, ssl=context, backlog=1024)
    (port,) = free_ports(1)
    words = ["deploy", "gateway", "--listen", f"127.0.0.1:{port}", "--secrets", str(secrets())]
    words += ["--superlink", f"127.0.0.1:{server.sockets[0].getsockname()[1]}", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen([str(BIN / "fedblur"), *words], env=env)
    try:
        while True:
            await asyncio.sleep(0.05)
            assert process.poll() is None
            with contextlib.suppress(OSError):
                socket_ = (await asyncio.open_connection("127.0.0.1", port))[1]
                socket_.close()
                break
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=300)
        server.close()


async def asked(client: httpx.AsyncClient) -> bool:
    """Ask as a node does, which tries again when a connection is ended, for ten seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    answer = await client.post("/v1/fleet/x", content=b"x", headers={"flwr-public-key": "good"})
                    if answer.status_code != 503:
                        return answer.status_code == 200
                await asyncio.sleep(0.1)
    return False


async def siege(
    attackers: int, requests: int, homes: list[str], honest: str, *options: str
) -> tuple[list[bool], float]:
    """Attack with so many connections at once; return which requests were answered, and the MB that it cost."""
    async with attacked(*options) as (port, process):
        url, before, most = f"https://127.0.0.1:{port}", process.memory_info().rss, 0
        words = [sys.executable, "-m", "tests.flower.strangers", str(port), str(secrets()), str(attackers), *homes]
        crowd = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE)
        answers: list[bool] = []
        try:
            async with node(url, seconds=PATIENCE, own=honest) as steady:
                await asyncio.sleep(2)
                for number in range(requests):
                    if number % 2:
                        answers.append(await asked(steady))
                    else:
                        async with node(url, seconds=PATIENCE, own=honest) as fresh:
                            answers.append(await asked(fresh))
                    most = max(most, process.memory_info().rss)
                    await asyncio.sleep(0.2)
        finally:
            early = crowd.poll()
            crowd.terminate()
            crowd.communicate(timeout=300)
        assert early is None  # they were there all the time
        return answers, (most - before) / 2**20


@pytest.mark.slow
def test_siege__a_hundred_hostile_connections_cost_little_and_block_nobody() -> None:
    """Of the node's own address, and more of them than there are places."""
    options = ("--connections", "64", "--per-address", "64")
    answers, cost = asyncio.run(siege(100, 10, ["127.0.0.1"], "127.0.0.1", *options))
    print(f"{sum(answers)} of {len(answers)} answered, {cost:.0f} MB")
    assert answers == [True] * 10
    assert cost < 40


@linux
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("homes", [["127.0.0.1"], [f"127.0.0.{last}" for last in range(3, 9)]], ids=["one", "six"])
def test_siege__a_thousand_hostile_connections_cost_100_mb_at_most_and_block_nobody(homes: list[str]) -> None:
    """From one address, and from six, which have more connections than there are places."""
    answers, cost = asyncio.run(siege(1000, 20, homes, "127.0.0.2"))
    print(f"{sum(answers)} of {len(answers)} answered, {cost:.0f} MB")
    assert answers == [True] * 20
    assert cost < 100
