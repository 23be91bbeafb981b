"""The door of a federation: passes nodes' requests on to the SuperLink, and nothing else.

Flower 1.41 serves three interfaces on one port: for nodes (which authenticate), for starting runs and registering nodes
(no login), and for its own processes. Whoever reaches that port can run code on every node. So the SuperLink listens on
loopback, and other machines reach only this: TLS, paths below /v1/fleet/, bodies up to a limit. Who sends them is known
only to the SuperLink, so all that a stranger can take up here is limited too: connections, memory, and time for a body.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fedblur.core.errors import ConfigError

_PATHS = "/v1/fleet/"
_BODIES = 16  # bodies of the largest size that fit in memory at once, of all connections together
_SECONDS = 300.0  # for a body to come in: Flower's largest part, 20 MiB, at 0.6 megabits a second
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}


class Bodies:
    """Bodies of requests in memory, within limits: of each one, of all of them together, and of time."""

    def __init__(self, largest: int, together: int, seconds: float) -> None:
        self.largest, self.together, self.seconds = largest, together, seconds
        self.held = 0  # bytes, of all that are being read or passed on

    async def read(self, request: Request, body: bytearray) -> int:
        """Fill `body`; what to answer if it goes beyond a limit, or 0."""
        try:
            async with asyncio.timeout(self.seconds):
                async for part in request.stream():
                    body += part
                    self.held += len(part)
                    if len(body) > self.largest:
                        return 413
                    if self.held > self.together:  # nodes try again on this status
                        return 503
        except TimeoutError:
            return 408
        return 0


def make_app(
    inner: httpx.AsyncClient, largest: int, together: int | None = None, seconds: float = _SECONDS
) -> Starlette:
    """Return the gateway as an ASGI app; `inner` reaches the SuperLink."""
    bodies = Bodies(largest, _BODIES * largest if together is None else together, seconds)

    async def forward(request: Request) -> Response:
        path = request.url.path
        if not path.startswith(_PATHS) or ".." in path or "%" in path or "//" in path:
            return Response(status_code=404)
        body = bytearray()
        try:
            status = await bodies.read(request, body)
            if status:
                return Response(status_code=status, headers={"connection": "close"})
            headers = [(name, value) for name, value in request.headers.items() if name not in _HOP]
            answer = await inner.post(path, content=bytes(body), headers=headers)
        except httpx.TransportError:  # the SuperLink is away: nodes try again on this status
            return Response(status_code=503)
        finally:
            bodies.held -= len(body)
        kept = {name: value for name, value in answer.headers.items() if name not in _HOP | {"content-encoding"}}
        return Response(answer.content, answer.status_code, kept)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])])


def serve(listen: str, superlink: str, secrets: Path, largest: int, connections: int) -> None:
    """Run the door until it is stopped."""
    host, _, port = listen.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host  # an address of IPv6
    if not host or not port.isdigit():
        raise ConfigError(f"--listen={listen!r} must be an address and a port, like 0.0.0.0:8443 or [::]:8443")
    for name in ("ca.crt", "server.crt", "server.key"):
        if not (secrets / name).is_file():
            raise ConfigError(f"{secrets / name} does not exist; make it with certificates.sh")
    context = ssl.create_default_context(cafile=str(secrets / "ca.crt"))
    fresh = httpx.Limits(max_keepalive_connections=0)  # a kept one may be closed as it is used, and a reply be lost
    inner = httpx.AsyncClient(base_url=f"https://{superlink}", verify=context, timeout=600.0, limits=fresh)
    uvicorn.run(
        make_app(inner, largest),
        host=host,
        port=int(port),
        limit_concurrency=connections,
        ssl_certfile=str(secrets / "server.crt"),
        ssl_keyfile=str(secrets / "server.key"),
        log_level="warning",
        access_log=False,
        server_header=False,
    )
