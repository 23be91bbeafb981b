"""`fedblur watch`: this machine only, GET of one page only, and only for a browser that asked for this very host."""

from __future__ import annotations

import functools
import http.client
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from fedblur.experiments.table import write_plan
from fedblur.experiments.table_spec import read_spec
from fedblur.report.serving import Live, LiveServer, serve
from tests.commandline import invoke

SHORT = ("--rounds", 4, "--clients", 40, "--quiet")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with serve(Live(tmp_path / "run"), port=0) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(
    server: LiveServer, method: str = "GET", path: str = "/", token: str | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    """With the server's own token unless another one is given."""
    path += f"{'&' if '?' in path else '?'}token={server.token if token is None else token}"
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=300)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def test_watch__counts_the_cells_of_a_table_that_has_not_begun(server: LiveServer, tmp_path: Path) -> None:
    spec = read_spec(Path(__file__).resolve().parents[2] / "examples/quickstart.toml")
    write_plan(spec, tmp_path / "run", tmp_path / "run/results")
    page = ask(server)[2]
    assert f"0 of {len(spec.cells)} cells done, round 0 of {sum(cell.config.rounds for cell in spec.cells):,}" in page
    assert f"<h1>{spec.title}</h1>" in page


def test_watch__a_stranger_neither_fills_the_terminal_nor_keeps_a_thread(
    server: LiveServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that is none was a traceback on the user's terminal, and each silent connection a thread for good."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as odd:
        odd.sendall(f"GET http://[::1/ HTTP/1.0\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        assert b"403 Forbidden" in odd.recv(2**10)
    monkeypatch.setattr(server.RequestHandlerClass, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as silent:
        assert silent.recv(1) == b""  # it was ended
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it ends with a reset
        gone.sendall(b"GET / HTTP/1.1\r\n")
    assert ask(server)[0] == 200
    assert capfd.readouterr() == ("", "")


def test_watch__binds_to_loopback_only(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_watch__waits_for_a_folder_that_is_not_there_yet_then_shows_it(server: LiveServer, tmp_path: Path) -> None:
    status, _, page = ask(server)
    assert status == 200
    assert f"Nothing is there yet: waiting for {tmp_path / 'run'}" in page
    invoke("run", *SHORT, "--out", tmp_path / "run")
    assert 'role="status">Complete</p>' in ask(server)[2]


def test_watch__an_unchanged_page_is_not_sent_again(server: LiveServer, tmp_path: Path) -> None:
    invoke("run", *SHORT, "--out", tmp_path / "run")
    _, headers, _ = ask(server)
    assert ask(server, If_None_Match=headers["ETag"])[0] == 304
    with (tmp_path / "run/rounds.jsonl").open("a") as file:
        file.write('{"round": 5, "eps')
    assert ask(server, If_None_Match=headers["ETag"])[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1", ""])
def test_watch__another_host_gets_nothing(server: LiveServer, host: str) -> None:
    status, _, body = ask(server, Host=host)
    assert status == 421
    assert "<html" not in body


def test_watch__localhost_is_this_machine_too(server: LiveServer) -> None:
    assert ask(server, Host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("path", ["/rounds.jsonl", "/../../etc/passwd", "/index.html", "/x", "/run/"])
def test_watch__serves_one_page_and_no_files(server: LiveServer, path: str) -> None:
    assert ask(server, path=path)[0] == 404


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
@pytest.mark.parametrize("path", ["/", "/rounds.jsonl"])
@pytest.mark.parametrize("token", ["", "x" * 43, "%00", "é"])
def test_watch__without_the_token_nobody_sees_the_page(server: LiveServer, method: str, path: str, token: str) -> None:
    """Every user of this machine reaches the port."""
    status, headers, body = ask(server, method, path, token=quote(token, safe="%"))
    assert status == 403
    assert "<html" not in body
    assert str(server.live.path) not in body
    assert not {"ETag", "Set-Cookie"} & set(headers)


def test_watch__every_server_has_a_token_of_its_own(server: LiveServer, tmp_path: Path) -> None:
    with serve(Live(tmp_path / "run"), port=0) as other:
        assert len(other.token) >= 40
        assert ask(server, token=other.token)[0] == 403
        assert server.url.endswith(f":{server.server_port}/?token={server.token}")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_watch__refuses_all_but_get(server: LiveServer, method: str) -> None:
    status, headers, _ = ask(server, method)
    assert status == 405
    assert headers["Allow"] == "GET"
    assert ask(server, "BREW")[0] == 501


def test_watch__may_not_be_framed_or_read_by_other_pages(server: LiveServer) -> None:
    headers = ask(server)[1]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers


def test_watch__a_broken_run_is_said_on_the_page(server: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{")
    assert "config.json cannot be read" in ask(server)[2]


def test_watch__a_port_that_is_taken_is_named(server: LiveServer, tmp_path: Path) -> None:
    shown = invoke("watch", tmp_path, "--port", server.server_port, status=2)
    assert f"--port {server.server_port} is taken" in " ".join(shown.split())


def test_watch__ends_cleanly_when_it_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedblur", "watch", str(tmp_path / "run"), "--port", "0"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are born deaf
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    ) as process:
        assert process.stdout is not None
        assert re.search(r"at http://127.0.0.1:\d+/\?token=[\w-]{40,} ", process.stdout.readline())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "stopped watching" in out
    assert err == ""
