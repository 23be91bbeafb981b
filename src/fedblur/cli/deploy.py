"""`fedblur deploy`: the files of a real federation over Flower, and the gateway for nodes."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedblur.cli.options import Json
from fedblur.cli.output import print_json
from fedblur.core.errors import ConfigError, RunError
from fedblur.core.files import clear_temporaries, make_folder, read_bytes, write_atomically
from fedblur.flower import template

app = typer.Typer(no_args_is_help=True, help="Deploy a real federation over Flower: TLS, keys for nodes, secure sums.")
_INSECURE = "warning: no TLS and no keys; for tests on this machine, never with people's data"


@app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    host: Annotated[str, typer.Option(help="Name or address at which nodes reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for nodes.")] = 8443,
    inner_port: Annotated[int, typer.Option(help="The SuperLink's own port, on the server only.")] = 8000,
    clients: Annotated[int, typer.Option(help="N, the number of nodes.")] = 3,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS and no keys; for tests on this machine only.")
    ] = False,
    json_: Json = False,
) -> None:
    """Write a complete Flower app: settings, a data loader to fill in, and scripts for certificates, server and nodes.

    TLS and keys for nodes are on. docs/deploy.md shows the way from here to a federation of three machines.

    Example: `fedblur deploy init federation --host fed.example.org --clients 3`
    """
    if insecure and not is_loopback(host):
        raise ConfigError(
            f"--insecure is for this machine only, and host={host!r} is another one; leave --insecure out"
        )
    for option, number in (("port", port), ("inner-port", inner_port)):
        if not 0 < number < 65536:
            raise ConfigError(f"--{option}={number} must be between 1 and 65535")
    if port == inner_port:
        raise ConfigError(f"--port={port} and --inner-port={inner_port} must differ: two programs of the server listen")
    if clients < 1:
        raise ConfigError(f"--clients={clients} must be 1 or more")
    here, name = str(folder.resolve()), _alternative_name(host)
    texts = template.files(here, host, port, inner_port, name, is_loopback(host), insecure, clients)
    _demand_own(folder, texts)
    for path, text in texts.items():
        make_folder((folder / path).parent)
        clear_temporaries((folder / path).parent)
        write_atomically(folder / path, text.encode())
    make_folder(folder / "secrets", private=True)
    if insecure:
        Console(stderr=True, soft_wrap=True).print(_INSECURE, markup=False)
    if json_:
        print_json({"folder": str(folder), "files": [str(folder / path) for path in texts], "tls": not insecure})
        return
    typer.echo(f"{folder}: fill in {folder / 'app/federation/task.py'}, then follow docs/deploy.md")


@app.command("gateway")
def gateway(
    listen: Annotated[str, typer.Option(help="Address and port for nodes.")] = "0.0.0.0:8443",
    superlink: Annotated[str, typer.Option(help="Where the SuperLink listens on this machine.")] = "127.0.0.1:8000",
    secrets: Annotated[Path, typer.Option(help="Folder with ca.crt, server.crt and server.key.")] = Path("secrets"),
    largest: Annotated[int, typer.Option(help="Maximum size of a request, in bytes.", min=1)] = 64 * 2**20,
    connections: Annotated[
        int, typer.Option(help="Maximum number of connections; a node has up to two.", min=1)
    ] = 1000,
    per_address: Annotated[
        int, typer.Option(help="Maximum number of connections per address; nodes behind one router share it.", min=1)
    ] = 256,
    client_ca: Annotated[
        Path | None, typer.Option(help="Admit only connections with a certificate that this authority signed.")
    ] = None,
) -> None:
    """Forward nodes' requests to the SuperLink, and refuse everything else.

    Headers, waiting time and connections of strangers are limited; docs/deploy.md has the figures.

    Example: `fedblur deploy gateway --listen 0.0.0.0:8443 --superlink 127.0.0.1:8000`
    """
    try:
        from fedblur.flower.gateway import Limits, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'fedblur[flower]'") from None
    limits = Limits(body=largest, connections=connections, per_address=per_address)
    serve(listen, superlink, secrets, limits, client_ca)


def _demand_own(folder: Path, texts: Mapping[str, str]) -> None:
    """Refuse a folder that holds anything but what this very command writes: it continues where it was killed."""
    for path in sorted(folder.rglob("*")) if folder.exists() else []:
        if path.is_dir() or path.match(".*.tmp"):
            continue
        text = texts.get(path.relative_to(folder).as_posix())
        if text is None or read_bytes(path, way_out="choose a new folder") != text.encode():
            raise RunError(f"{folder} is not empty: it holds {path.relative_to(folder)}; choose a new folder")


def is_loopback(host: str) -> bool:
    """Return whether this names the machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _alternative_name(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host.replace('%', ' '))}"  # an interface of this machine is nobody else's
    except ValueError:
        if not host.isascii() or not all(part.strip("-").replace("-", "").isalnum() for part in host.split(".")):
            raise ConfigError(f"host={host!r} is neither an address nor a name, like fed.example.org") from None
        return f"DNS:{host}"
