"""A gateway in this process on a free port of loopback, with certificates of its own, and a client that trusts them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from fedblur.cli.app import app
from fedblur.flower.gateway import Gateway, Limits, listening, server_context

HANG = 60  # seconds until a test gives up
_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@functools.cache
def secrets() -> Path:
    """Return a folder with ca.crt, server.crt and server.key, as `deploy init` makes them."""
    _KEPT.append(tempfile.TemporaryDirectory())
    folder = Path(_KEPT[0].name) / "f"
    assert CliRunner().invoke(app, ["deploy", "init", str(folder)]).exit_code == 0
    subprocess.run(["sh", str(folder / "certificates.sh")], check=True, capture_output=True)
    return folder / "secrets"


@functools.cache
def trusted() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(secrets() / "ca.crt"))


@dataclass(frozen=True)
class Door:
    gateway: Gateway
    port: int

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def until(self, what: Callable[[Gateway], bool]) -> None:
        async with asyncio.timeout(HANG):
            while not what(self.gateway):
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def door(
    limits: Limits,
    superlink: Callable[[httpx.Request], Any] = lambda request: httpx.Response(200),
    client_ca: Path | None = None,
) -> AsyncIterator[Door]:
    """Serve until the block ends."""
    (listener,) = listening("127.0.0.1:0")
    async with httpx.AsyncClient(transport=httpx.MockTransport(superlink), base_url="https://inner") as inner:
        gateway = Gateway(inner, server_context(secrets(), client_ca), limits)
        accepting = asyncio.create_task(gateway.listen(listener))
        try:
            yield Door(gateway, listener.getsockname()[1])
        finally:
            accepting.cancel()
            listener.close()
            await gateway.close()


def node(url: str, verify: ssl.SSLContext | None = None, seconds: float = 300.0, own: str | None = None) -> Any:
    """Return a client like a node's; `own` is the address that it comes from."""
    carrier = httpx.AsyncHTTPTransport(verify=verify or trusted(), local_address=own)
    return httpx.AsyncClient(base_url=url, transport=carrier, timeout=seconds)


async def spoken(port: int, words: bytes, tls: bool = True) -> bytes:
    """Return all that the gateway answers to these bytes until it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted() if tls else None)
    said = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        writer.write(words)
        await writer.drain()
        async with asyncio.timeout(HANG):
            while part := await reader.read(2**16):
                said += part
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return said
