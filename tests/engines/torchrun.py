"""torchrun whose two processes are forks of one that has imported everything: seconds less for each.

    python tests/engines/torchrun.py -m fedblur WORDS …    or    python tests/engines/torchrun.py ranks.py FOLDER

The agent is torch's own: it restarts nothing, and ends all processes when one has failed.
"""

from __future__ import annotations

import os
import runpy
import sys

import sklearn.datasets  # noqa: F401  what a run imports when it first needs it
import torch._dynamo  # noqa: F401
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import fedblur.cli.app


def start(words: list[str]) -> None:
    """Be one of the processes."""
    sys.argv = ["fedblur", *words[2:]] if words[0] == "-m" else words
    if words[0] == "-m":
        fedblur.cli.app.main()
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id=str(os.getpid()), max_restarts=0, monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    try:
        elastic_launch(config, start)(sys.argv[1:])
    except ChildFailedError:
        sys.exit(1)
