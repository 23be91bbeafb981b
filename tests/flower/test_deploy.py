"""`fedblur deploy`: the files of a new federation, what `flwr` packs of them, and the gateway."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import socket
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from fedblur.cli.app import app
from fedblur.core.errors import ConfigError, RunError
from fedblur.flower.gateway import Limits, listening
from fedblur.flower.settings import Deployment
from tests.flower.door import door, node, spoken
from tests.flower.world import LoopGrid, federated

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
ENV = {
    **os.environ,
    "PATH": f"{BIN}:{os.environ['PATH']}",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}


def init(folder: Path, *options: str):
    return CliRunner().invoke(app, ["deploy", "init", str(folder), *options])


def test_init__writes_a_federation_with_tls_and_keys(tmp_path: Path) -> None:
    result = init(tmp_path / "f", "--host", "fed.example.org", "--port", "9443")
    assert result.exit_code == 0, result.output
    scripts = {path.name: path.read_text() for path in (tmp_path / "f").glob("*.sh")}
    assert set(scripts) == {"certificates.sh", "superlink.sh", "gateway.sh", "supernode.sh"}
    assert "--insecure" not in "".join(scripts.values())
    assert "--enable-supernode-auth" in scripts["superlink.sh"]
    assert "--host 127.0.0.1" in scripts["superlink.sh"]  # others come through the gateway
    assert '--superlink "fed.example.org:9443"' in scripts["supernode.sh"]
    assert "DNS:fed.example.org" in scripts["certificates.sh"]
    assert (tmp_path / "f/secrets").stat().st_mode & 0o077 == 0


def test_init__insecure_is_for_loopback_only_and_says_so(tmp_path: Path) -> None:
    result = init(tmp_path / "f", "--insecure")
    assert result.exit_code == 0
    assert "never with people's data" in result.output
    assert not (tmp_path / "f/gateway.sh").exists()
    refused = init(tmp_path / "g", "--insecure", "--host", "10.0.0.5")
    assert refused.exit_code == 2
    assert "host='10.0.0.5' is another one" in refused.output
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "0"], "--port=0"),
        (["--port", "8000"], "--port=8000 and --inner-port=8000 must differ"),
        (["--clients", "0"], "--clients=0"),
        (["--host", "no such;host"], "neither an address nor a name"),
        (["--host", "fe80::1%eth0"], "neither an address nor a name"),
    ],
)
def test_init__bad_values_are_named(tmp_path: Path, options: list[str], message: str) -> None:
    result = init(tmp_path / "f", *options)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(("host", "door"), [("2001:db8::5", "[::]"), ("::1", "[::1]"), ("10.0.0.5", "0.0.0.0")])
def test_init__an_address_of_ipv6_has_brackets_and_a_door(tmp_path: Path, host: str, door: str) -> None:
    assert init(tmp_path / "f", "--host", host).exit_code == 0
    outside = f"[{host}]" if ":" in host else host
    assert f'--superlink "{outside}:8443"' in (tmp_path / "f/supernode.sh").read_text()
    assert f'--listen "{door}:8443"' in (tmp_path / "f/gateway.sh").read_text()
    assert f"IP:{host}," in (tmp_path / "f/certificates.sh").read_text()


def test_init__any_path_makes_whole_toml_files(tmp_path: Path) -> None:
    folder = tmp_path / 'a "quoted" $name \\ with all'
    assert init(folder).exit_code == 0
    settings = tomllib.loads((folder / "app/pyproject.toml").read_text())
    assert settings["tool"]["flwr"]["app"]["config"]["out"] == f"{folder}/run"
    connection = tomllib.loads((folder / "state/config.toml").read_text())
    assert connection["superlink"]["federation"]["root-certificates"] == f"{folder}/secrets/ca.crt"


def test_certificates__made_again_are_of_the_same_authority(tmp_path: Path) -> None:
    """Nodes hold a copy of ca.crt: a renewed server must still be the one that they know."""
    assert init(tmp_path / "f").exit_code == 0
    secrets = tmp_path / "f/secrets"
    make = ["sh", str(tmp_path / "f/certificates.sh")]
    subprocess.run(make, check=True, capture_output=True)
    first = {path.name: path.read_bytes() for path in secrets.iterdir()}
    assert set(first) == {"ca.crt", "ca.key", "ca.srl", "server.crt", "server.key"}
    subprocess.run(make, check=True, capture_output=True)
    again = {path.name: path.read_bytes() for path in secrets.iterdir()}
    assert [name for name in first if first[name] == again[name]] == [n for n in first if n in ("ca.crt", "ca.key")]
    verify = ["openssl", "verify", "-CAfile", str(secrets / "ca.crt"), str(secrets / "server.crt")]
    subprocess.run(verify, check=True, capture_output=True)
    (secrets / "ca.key").unlink()  # kept elsewhere, as docs/deploy.md says
    refused = subprocess.run(make, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "ca.key is not here" in refused.stderr
    assert {path.name: path.read_bytes() for path in secrets.iterdir()} == {
        name: data for name, data in again.items() if name != "ca.key"
    }


def test_init__does_not_overwrite(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    result = init(tmp_path)
    assert result.exit_code == 2
    assert "not empty" in result.output


def test_init__that_was_killed_continues_and_leaves_what_was_edited(tmp_path: Path) -> None:
    assert init(tmp_path / "app").exit_code == 0
    files = sorted(path for path in (tmp_path / "app").rglob("*") if path.is_file())
    whole = {path: path.read_bytes() for path in files}
    for path in files[1::2]:
        path.unlink()
    (files[0].parent / f".{files[0].name}.1.tmp").write_bytes(b"half")
    assert init(tmp_path / "app").exit_code == 0
    assert {path: path.read_bytes() for path in (tmp_path / "app").rglob("*") if path.is_file()} == whole
    files[0].write_text("mine")
    assert f"it holds {files[0].relative_to(tmp_path / 'app')}" in init(tmp_path / "app").output
    assert files[0].read_text() == "mine"


def test_init__what_flower_packs_holds_no_secret(tmp_path: Path) -> None:
    """`flwr build` packs what `flwr run` would send to every node."""
    folder = tmp_path / "f"
    assert init(folder).exit_code == 0
    subprocess.run(["sh", "certificates.sh"], cwd=folder, env=ENV, check=True, capture_output=True)
    key = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", "secrets/node-0"]
    subprocess.run(key, cwd=folder, check=True)
    env = {**ENV, "FLWR_HOME": str(folder / "state")}
    subprocess.run(["flwr", "build", "--app", "app"], cwd=folder, env=env, check=True, capture_output=True)
    (packed,) = folder.rglob("*.fab")
    with zipfile.ZipFile(packed) as archive:
        names = archive.namelist()
        text = b"".join(archive.read(name) for name in names)
    assert "federation/fedblur.toml" in names
    assert b"PRIVATE KEY" not in text
    assert not [name for name in names if name.startswith(("secrets", "state"))]
    made = {path.name: path.stat().st_mode & 0o077 for path in (folder / "secrets").glob("*.key")}
    assert made == {"ca.key": 0, "server.key": 0}


def template_task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    monkeypatch.syspath_prepend(str(folder / "app"))
    for name in [name for name in sys.modules if name.split(".")[0] == "federation"]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("federation.task").task


def test_template__trains_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example task runs before anything is filled in; only the number of rounds is made smaller."""
    assert init(tmp_path / "f").exit_code == 0
    config = tmp_path / "f/app/federation/fedblur.toml"
    config.write_text(config.read_text().replace("rounds = 3 ", "rounds = 2 "))
    task = template_task(tmp_path / "f", monkeypatch)
    run = federated(task, LoopGrid(task, 3, "central"), tmp_path / "run", "central")
    assert run.summary["status"] == "complete"
    assert run.summary["privacy"]["warning"] is None
    text = config.read_text().replace('mechanism = "gaussian"', "", 1)
    config.write_text(text.replace("# accountant", "accountant").replace("# mechanism = {", "mechanism = {"))
    run = federated(task, LoopGrid(task, 3, "secure-sum"), tmp_path / "secure", "secure-sum")
    assert "honest-but-curious" in run.summary["privacy"]["trust_model"]


def test_template__trains_with_the_guides_many_virtual_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of docs/deploy.md; Flower's simulation tells each node its number and how many there are."""
    guide = (ROOT / "docs/deploy.md").read_text()
    (options,) = re.findall(r"fedblur deploy init federation (--insecure .*)", guide)
    (nodes,) = re.findall(r"num-supernodes=(\d+)", guide)
    result = init(tmp_path / "f", *options.split())
    assert result.exit_code == 0, result.output
    task = template_task(tmp_path / "f", monkeypatch)
    grid = LoopGrid(task, int(nodes), "central")
    for context in grid.contexts.values():
        context.node_config["num-partitions"] = int(nodes)
    run = federated(task, grid, tmp_path / "run", "central")
    assert run.rounds[-1]["local_only"]["nodes"]["answered"] == int(nodes)
    assert sum(len(task.client_data(context.node_config)[0]) for context in grid.contexts.values()) == 1400


def ask(path: str, body: bytes = b"x", largest: int = 100, away: bool = False) -> tuple[int, list[httpx.Request]]:
    """One request through the gateway, and what came out behind it."""
    seen: list[httpx.Request] = []

    def superlink(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if away:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return httpx.Response(200, content=b"answer")

    async def go() -> int:
        async with door(Limits(body=largest), superlink) as made, node(made.url) as client:
            answer = await client.post(
                "/", content=body, headers={"flwr-key": "k"}, extensions={"target": path.encode()}
            )
            assert answer.content == (b"answer" if answer.is_success else b"")
            return answer.status_code

    return asyncio.run(go()), seen


def test_gateway__lets_nodes_through_with_their_headers() -> None:
    status, seen = ask("/v1/fleet/pull-messages", b"hello")
    assert status == 200
    assert (seen[0].url.path, seen[0].content, seen[0].headers["flwr-key"]) == (
        "/v1/fleet/pull-messages",
        b"hello",
        "k",
    )


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/docs",
        "/",
        "/v1/fleet",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet//control",
        "/V1/FLEET/x",
    ],
)
def test_gateway__lets_nothing_else_through(path: str) -> None:
    status, seen = ask(path)
    assert status == 404
    assert not seen


def test_gateway__a_superlink_that_is_away_is_a_status_on_which_nodes_try_again() -> None:
    assert ask("/v1/fleet/push-messages", away=True)[0] == 503


def test_gateway__refuses_huge_requests() -> None:
    assert ask("/v1/fleet/push-object", bytes(100))[0] == 200
    status, seen = ask("/v1/fleet/push-object", bytes(101))
    assert status == 413
    assert not seen


async def held_up(until: asyncio.Event) -> AsyncIterator[bytes]:
    """A body of 80 bytes whose last one is kept back."""
    yield bytes(79)
    await until.wait()
    yield b"x"


@pytest.mark.parametrize("limits", [{"pause": 0.2}, {"whole": 0.2}])
def test_gateway__a_body_that_does_not_come_is_not_waited_for(limits: dict[str, float]) -> None:
    async def go() -> bytes:
        async with door(Limits(**limits)) as made:
            head = b"POST /v1/fleet/x HTTP/1.1\r\nhost: x\r\ncontent-length: 80\r\n\r\n"
            return await spoken(made.port, head + bytes(79))

    assert asyncio.run(go()).startswith(b"HTTP/1.1 408 ")


def test_gateway__bodies_of_many_connections_together_are_limited() -> None:
    async def go() -> list[int]:
        async with door(Limits(body=100, bodies=150)) as made, node(made.url) as client:
            end = asyncio.Event()
            first = asyncio.create_task(
                client.post("/v1/fleet/x", content=held_up(end), headers={"content-length": "80"})
            )
            await made.until(lambda gateway: gateway.held == 79)
            second = await client.post("/v1/fleet/x", content=bytes(80))
            end.set()
            answers = [second, await first, await client.post("/v1/fleet/x", content=bytes(80))]
            assert made.gateway.held == 0
            return [answer.status_code for answer in answers]

    assert asyncio.run(go()) == [503, 200, 200]


def test_gateway__listens_where_it_is_told_to_a_limited_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert init(tmp_path / "f", "--host", "::1").exit_code == 0
    subprocess.run(["sh", str(tmp_path / "f/certificates.sh")], check=True, capture_output=True)
    asked: list[Any] = []
    monkeypatch.setattr("fedblur.flower.gateway.listening", lambda listen: [asked.append(listen)])
    monkeypatch.setattr("fedblur.flower.gateway._serve", lambda *given: asked.extend(given))
    monkeypatch.setattr("fedblur.flower.gateway.asyncio.run", lambda given: None)
    options = ["--listen", "[::1]:8443", "--secrets", str(tmp_path / "f/secrets")]
    options += ["--connections", "7", "--per-address", "3"]
    result = CliRunner().invoke(app, ["deploy", "gateway", *options])
    assert result.exit_code == 0, result.output
    assert asked[0] == "[::1]:8443"
    assert (asked[4].connections, asked[4].per_address) == (7, 3)


@pytest.mark.parametrize("listen", ["8443", "host:port", ":8443", "[]:1"])
def test_gateway__an_address_that_is_none_is_named(listen: str) -> None:
    with pytest.raises(ConfigError, match="must be an address and a port"):
        listening(listen)


def test_gateway__an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RunError, match="cannot be used"):
        listening(f"127.0.0.1:{taken.getsockname()[1]}")


def test_gateway__needs_its_certificates(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["deploy", "gateway", "--secrets", str(tmp_path)])
    assert result.exit_code == 2
    assert "certificates.sh" in result.output
