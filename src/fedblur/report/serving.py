"""The live page. In: a folder, which need not exist yet. Out: its report over HTTP, to this machine only.

Other users of this machine reach 127.0.0.1 too, so the page's address has a random token that the command prints; a
request without it gets 403. It is in no cookie: browsers send those to every port of a host, other users' too.
Only GET of the page itself is answered, and only when the browser asked for this host: a page from elsewhere whose name
was pointed at 127.0.0.1 (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
import sys
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

from fedblur.core.errors import FedBlurError, RunError
from fedblur.report.dashboard import make_report, policy, render, render_waiting
from fedblur.report.records import find_records, not_begun

PORT = 8765
_FILES = ("config.json", "rounds.jsonl", "summary.json", "results/*.json", "results/*.jsonl.gz", "tables/*.json")


@dataclass
class Live:
    """The page about a folder, made again when something in it has changed."""

    path: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _made: tuple[str, str] = ("", "")  # what it was made of, and the page

    def page(self) -> tuple[str, str]:
        """Return (tag, page): the tag changes when the page may have."""
        with self._lock:
            seen = []
            for file in self._files():
                try:
                    stat = file.stat()
                except OSError:  # gone in between
                    continue
                seen.append(f"{file} {stat.st_size} {stat.st_mtime_ns}")
            tag = hashlib.sha256("\n".join(sorted(seen)).encode()).hexdigest()[:16]
            if tag != self._made[0]:
                self._made = (tag, self._render())
            return self._made

    def _render(self) -> str:
        name = str(self.path)
        waiting = not_begun([self.path]).values()
        try:
            return render(make_report(find_records([self.path]), waiting=waiting), live=name)
        except FedBlurError as error:
            words = f"Nothing is there yet: waiting for {name}" if not self._files() else str(error)
            return render_waiting(name, words, waiting)

    def _files(self) -> list[Path]:
        folders = [self.path, *self.path.glob("*/"), *self.path.glob("cells/*/")]
        return [file for folder in folders for pattern in _FILES for file in folder.glob(pattern)]


class LiveServer(ThreadingHTTPServer):
    """A server on loopback; its threads end with it."""

    daemon_threads = True

    def __init__(self, live: Live, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.live = live
        self.token = secrets.token_urlsafe(32)

    def handle_error(self, request: object, client_address: object) -> None:
        """Pass over a browser that is gone; print what is a bug."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    @property
    def hosts(self) -> set[str]:
        return {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}


def serve(live: Live, port: int = PORT) -> LiveServer:
    """Return a server that is bound but not started; close it when done."""
    try:
        return LiveServer(live, port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise RunError(f"--port {port} is taken or not allowed here; choose another, or 0 for a free one") from None


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = 10  # seconds of silence: each connection is a thread
    server_version, sys_version = "fedblur", ""

    def do_GET(self) -> None:
        if not self._may_ask():
            return
        if self.path.partition("?")[0] != "/":
            self._answer(HTTPStatus.NOT_FOUND, b"there is one page here: /\n")
        else:
            tag, page = self.server.live.page()
            if self.headers.get("If-None-Match") == f'"{tag}"':
                self._answer(HTTPStatus.NOT_MODIFIED, b"", tag)
            else:
                self._answer(HTTPStatus.OK, page.encode(), tag)

    def _may_ask(self) -> bool:
        """Return whether it asks for this host and has the token; else it is answered already."""
        given = parse_qs(self.path.partition("?")[2]).get("token", [""])[-1]
        if self.headers.get("Host", "") not in self.server.hosts:
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"this server answers to 127.0.0.1 and localhost only\n")
        elif not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, b"open the address that fedblur watch has printed, with its token\n")
        else:
            return True
        return False

    def _refuse(self) -> None:
        self.close_connection = True  # a body, if there is one, is not read
        if not self._may_ask():
            return
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"GET only\n")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _answer(self, status: HTTPStatus, body: bytes, tag: str = "") -> None:
        kind = "text/html" if status is HTTPStatus.OK else "text/plain"
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{policy('live')}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        headers |= {"ETag": f'"{tag}"'} if tag else {}
        headers |= {"Allow": "GET"} if status is HTTPStatus.METHOD_NOT_ALLOWED else {}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal belongs to the user."""
