"""The files of a new federation, as `fedblur deploy init` writes them. Secrets stay out of the app that is sent around.

app/             what `flwr run` packs and sends to every node: code and settings, no data, no keys
secrets/         certificates and keys, made by certificates.sh; never packed
state/           Flower's own files: its connection settings, the SuperLink's database
run/             the run folder, on the server
"""

from __future__ import annotations

import json
from string import Template

_PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "federation"
version = "1.0.0"
description = "A federation trained with FedBlur"
license = { text = "your own" }
dependencies = ["fedblur[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["federation"]

[tool.flwr.app]
publisher = "operator"

[tool.flwr.app.components]
serverapp = "federation.server_app:app"
clientapp = "federation.client_app:app"

[tool.flwr.app.config]
trust = "central"       # or "secure-sum": the server sees masked sums only (needs the other mechanism in fedblur.toml)
deadline = 600.0        # seconds that a node has for an answer
start-timeout = 600.0   # seconds to wait for all nodes before the first round
out = $out  # the run folder, on the server
"""

_CONFIG = """# The training of this federation; every key of `fedblur run` can stand here.
clients = $clients               # N, the number of nodes: all of them must be online when the run starts
rounds = 3                # raise it when everything works
sample_rate = 1.0         # p, each node joins a round with this probability
epsilon = 8.0
delta = 1e-3
clip_norm = 0.5
model = "logistic"
checkpoint_every = 1      # a server that is killed repeats one round at most
local = { steps = 5, batch_size = 32, learning_rate = 0.5 }

# trust = "central" (see pyproject.toml): the server adds the noise
mechanism = "gaussian"
# trust = "secure-sum": each node adds its share, sized for min_cohort nodes; a round with fewer is aborted
# accountant = "rdp"
# mechanism = { name = "ddgauss", mode = "exact", min_cohort = 3, bits = 20 }
"""

_TASK = '''"""The task: data and model. Fill in the two loaders; this example divides scikit-learn's digits."""

from pathlib import Path

import numpy as np

from fedblur.flower.settings import Deployment


def _digits():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x.reshape(-1, 1, 8, 8) / 16).astype(np.float32), y


def client_data(node):
    """This node's own samples and labels. `node` holds what --node-config says, for instance a path."""
    x, y = _digits()
    mine = slice(int(node["partition-id"]), 1400, int(node.get("num-partitions", 4)))  # every fourth one
    return x[mine], y[mine]


def test_data():
    """Samples on the server that belong to nobody in the federation."""
    x, y = _digits()
    return x[1400:], y[1400:]


task = Deployment(
    config=Path(__file__).with_name("fedblur.toml"),
    shape=(1, 8, 8),
    classes=10,
    client_data=client_data,
    test_data=test_data,
)
'''

_CLIENT = '''"""What nodes run."""

from fedblur.flower.client import client_app

from federation.task import task

app = client_app(task)
'''

_SERVER = '''"""What the server runs."""

from fedblur.flower.server import server_app

from federation.task import task

app = server_app(task)
'''

_CERTIFICATES = """#!/bin/sh
# On the server: an authority of your own, once, and the server's certificate for $host, for 825 days. Run it again to
# renew the latter: the authority stays, since nodes know the server by it.
set -eu
umask 077
cd "$$(dirname "$$0")" && mkdir -p secrets && cd secrets
if [ ! -e ca.crt ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 3650 -subj "/CN=federation authority" \\
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" \\
    -keyout ca.key -out ca.crt
fi
if [ ! -e ca.key ]; then
  echo "secrets/ca.key is not here; bring it back to make a certificate for the server" >&2
  exit 1
fi
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -subj "/CN=$host" -keyout new.key -out new.csr
printf 'subjectAltName=%s\\nextendedKeyUsage=serverAuth\\nbasicConstraints=CA:FALSE\\n' "$names" > new.ext
openssl x509 -req -in new.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 825 -extfile new.ext -out new.crt
mv new.key server.key
mv new.crt server.crt
rm new.csr new.ext
"""

_SUPERLINK = """#!/bin/sh
# On the server: Flower's SuperLink, on this machine only. Nodes on other machines come in through gateway.sh.
set -eu
cd "$$(dirname "$$0")"
export FLWR_HOME="$$PWD/state" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec flower-superlink $link --host 127.0.0.1 --port $inner --database state/superlink.db \\
  --disable-runtime-dependency-installation
"""

_GATEWAY = """#!/bin/sh
# On the server: what other machines may reach. It lets nodes through to the SuperLink, and nothing else: Flower serves
# the interface that starts runs, which has no login, on the same port.
set -eu
cd "$$(dirname "$$0")"
exec fedblur deploy gateway --listen "$door:$port" --superlink 127.0.0.1:$inner --secrets secrets
"""

_SUPERNODE = """#!/bin/sh
# On a node: sh supernode.sh KEY [NODE_CONFIG [PORT]], for instance: sh supernode.sh secrets/node-0 'partition-id=0'
# It needs this file, secrets/ca.crt and the node's own key, made there by: ssh-keygen -t ecdsa -b 384 -N "" -f KEY
set -eu
cd "$$(dirname "$$0")"
export FLWR_HOME="$$PWD/state/$$(basename "$$1")" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
mkdir -p "$$FLWR_HOME"
exec flower-supernode $node --node-config "$${2:-}" --port "$${3:-9094}"
"""

_CONNECTION = """[superlink]
default = "federation"

[superlink.federation]
address = "127.0.0.1:$inner"
$security
"""

FILES = {
    "app/pyproject.toml": _PYPROJECT,
    "app/federation/__init__.py": '"""A federation, trained with FedBlur."""\n',
    "app/federation/fedblur.toml": _CONFIG,
    "app/federation/task.py": _TASK,
    "app/federation/client_app.py": _CLIENT,
    "app/federation/server_app.py": _SERVER,
    "certificates.sh": _CERTIFICATES,
    "superlink.sh": _SUPERLINK,
    "gateway.sh": _GATEWAY,
    "supernode.sh": _SUPERNODE,
    "state/config.toml": _CONNECTION,
    ".gitignore": "secrets/\nstate/\nrun/\n",
}
_SECURE_LINK = (
    "--ssl-ca-certfile secrets/ca.crt --ssl-certfile secrets/server.crt --ssl-keyfile secrets/server.key "
    "--enable-supernode-auth"
)


def files(
    folder: str, host: str, port: int, inner: int, name: str, loopback: bool, insecure: bool, clients: int
) -> dict[str, str]:
    """Return path and text of every file. `name`: DNS:… or IP:… of the host; `inner`: the SuperLink's own port."""
    six = ":" in host
    address = f"[{host}]" if six else host
    secure_node = f'--root-certificates secrets/ca.crt --auth-supernode-private-key "$1" --superlink "{address}:{port}"'
    values = {
        "out": _quoted(f"{folder}/run"),
        "host": host,
        "clients": str(clients),
        "door": address if loopback else "[::]" if six else "0.0.0.0",
        "port": str(port),
        "inner": str(inner),
        "names": ",".join(dict.fromkeys((name, "IP:127.0.0.1", "DNS:localhost"))),
        "link": "--insecure" if insecure else _SECURE_LINK,
        "node": f"--insecure --superlink 127.0.0.1:{inner}" if insecure else secure_node,
        "security": "insecure = true" if insecure else f"root-certificates = {_quoted(f'{folder}/secrets/ca.crt')}",
    }
    left_out = {"certificates.sh", "gateway.sh"} if insecure else set()
    return {path: Template(text).substitute(values) for path, text in FILES.items() if path not in left_out}


def _quoted(text: str) -> str:
    """Write a TOML string, which escapes as JSON does."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
