"""A real federation on loopback, from the files of `fedblur deploy init`: processes are ended by their id."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def wait_for(what: Callable[[], object], seconds: float, why: str) -> object:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds} s: {why}")


class Machines:
    """The folder of a federation, and every process that was started for it."""

    def __init__(self, folder: Path, *init: str) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}",
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": str(folder / "state"),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        }
        self.env.pop("FEDBLUR_CACHE", None)
        self.started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.port, self.inner = free_ports(2)
        ports = ["--port", str(self.port), "--inner-port", str(self.inner)]
        self.sh(str(BIN / "fedblur"), "deploy", "init", str(folder), *ports, *init)

    def sh(self, *command: str, seconds: float = 300) -> str:
        """Run a command in the folder to its end."""
        cwd = self.folder if self.folder.exists() else None
        done = subprocess.run(command, cwd=cwd, env=self.env, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def start(self, name: str, *command: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as file:
            process = subprocess.Popen([*prefix, *command], cwd=self.folder, env=self.env, stdout=file, stderr=file)
        self.started.append((name, process))
        return process

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def end(self, process: subprocess.Popen[bytes], how: int = signal.SIGKILL) -> None:
        """End a process that was started here, and its children, by their ids."""
        try:
            family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        except psutil.NoSuchProcess:
            family = []
        for member in family:
            try:
                member.send_signal(how)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=20)
        process.wait(timeout=20)

    def close(self) -> None:
        for _, process in reversed(self.started):
            self.end(process)

    # the steps of docs/deploy.md

    def certificates(self) -> None:
        self.sh("sh", "certificates.sh")

    def server(self, gateway: bool = True) -> None:
        self.link = self.start("superlink", "sh", "superlink.sh")
        wait_for(lambda: "Uvicorn running" in self.log("superlink") or self._open(self.inner), 600, "the SuperLink")
        if gateway:
            self.start("gateway", "sh", "gateway.sh")
            wait_for(lambda: self._open(self.port), 600, "the gateway")

    def register(self, name: str) -> None:
        self.sh("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"secrets/{name}")
        self.sh("flwr", "supernode", "register", f"secrets/{name}.pub", "federation")

    def node(self, name: str, config: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        port = free_ports(1)[0]
        return self.start(name, "sh", "supernode.sh", f"secrets/{name}", config, str(port), prefix=prefix)

    def node_id(self, name: str) -> int:
        def found() -> int:
            ids = re.findall(r"SuperNode ID: (\d+)", self.log(name))
            return int(ids[-1]) if ids else 0

        return int(str(wait_for(found, 300, f"{name} to be active: {self.log(name)[-2000:]}")))

    def run(self, *options: str, name: str = "run") -> subprocess.Popen[bytes]:
        return self.start(name, "flwr", "run", "app", "federation", "--stream", *options)

    def _open(self, port: int) -> bool:
        with socket.socket() as s:
            s.settimeout(1)
            return s.connect_ex(("127.0.0.1", port)) == 0
