"""The roster: the nodes of a run, in an order that stays. Client i of the population is node i of the roster.

The roster is fixed when the run starts and kept in its folder, so that sampling, N and delta mean the same after a
resume. Nodes that come later are not part of the run; nodes that go away count as zero until they are back.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from logging import INFO
from pathlib import Path

from flwr.common.logger import log
from flwr.serverapp import Grid

from fedblur.core.errors import RunError
from fedblur.core.files import read_json_if_there, remove, write_atomically

_PAUSE = 0.5  # seconds


@dataclass
class Roster:
    """The nodes of a run, by client."""

    path: Path
    trust: str
    timeout: float  # seconds to wait for the nodes of a new run
    new: bool = True  # a run that has not begun: a roster that lies there is of a start that came to nothing
    nodes: list[int] = field(default_factory=list)

    def wait(self, grid: Grid, clients: int) -> None:
        """Read the roster, or wait until so many nodes are online and write it. The run folder is held."""
        if self.new:
            remove(self.path)
        elif (table := read_json_if_there(self.path, "restore it, or start a new run")) is not None:
            try:
                self.nodes, trust = [int(node) for node in table["nodes"]], table["trust"]
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(f"{self.path} cannot be read: {error}; restore it, or start a new run") from None
            if trust != self.trust or len(self.nodes) != clients:
                raise RunError(
                    f"{self.path} is of a run with trust={trust!r} and {len(self.nodes)} nodes, not {self.trust!r} "
                    f"and {clients}; put the settings back or start a new run"
                )
            return
        end = time.monotonic() + self.timeout
        while len(online := sorted(grid.get_node_ids())) < clients and time.monotonic() < end:
            time.sleep(_PAUSE)
        if len(online) != clients:
            raise RunError(
                f"{len(online)} nodes are online and the configuration says clients={clients}; start or stop nodes, "
                "or set clients to the number of nodes"
            )
        self.nodes = online
        text = json.dumps({"trust": self.trust, "nodes": [str(node) for node in online]}, indent=2)
        write_atomically(self.path, f"{text}\n".encode(), private=True)
        log(INFO, "%d nodes are enrolled", len(online))
