"""The ServerApp: `train.py`'s own loop with a federation's nodes. Ledger, checkpoints, budget and report are the same.

If the run folder holds a run of this configuration that began, it is resumed: start the app again after a crash, and no
round is released twice without being paid for twice.
"""

from __future__ import annotations

import json
from logging import INFO
from pathlib import Path

import torch
from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fedblur.core.callbacks import Row, figures_of
from fedblur.core.config import canonical, differences, to_dict
from fedblur.core.errors import ConfigError, PrivacyError, RunError
from fedblur.data.federation import own_samples
from fedblur.data.population import Federation, Shard, tensors_of
from fedblur.flower.exchange import Exchange
from fedblur.flower.nodes import CentralNodes, Nodes, SecureNodes
from fedblur.flower.roster import Roster
from fedblur.flower.settings import Deployment, Settings
from fedblur.report.text import words_of_population
from fedblur.training.loop import Run, train
from fedblur.training.machine import Machine
from fedblur.training.resume import resume
from fedblur.training.run_folder import RunFolder

_MODELS: dict[str, type[Nodes]] = {"central": CentralNodes, "secure-sum": SecureNodes}


class Remote:
    """Clients whose data are elsewhere: their number is all that a server has."""

    def __init__(self, clients: int, shape: tuple[int, ...], classes: int) -> None:
        self.clients, self.shape, self.classes = clients, tuple(shape), classes

    def fetch(self, ids: Tensor) -> Shard:
        raise PrivacyError("a federation's data stay on its nodes")

    def to(self, device: torch.device) -> Remote:
        return self


def server_app(deployment: Deployment) -> ServerApp:
    """Return the app that the server runs."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(deployment, grid, Settings.read(context.run_config))

    return app


def serve(deployment: Deployment, grid: Grid, settings: Settings) -> Run:
    """Train with the nodes of this grid, from the start or from where the run folder is."""
    config, folder = deployment.configuration(), RunFolder(Path(settings.out))
    if config.clients is None:
        raise ConfigError(f"{deployment.config.name} must say clients = N, the number of nodes of the federation")
    if config.voting is not None:
        raise ConfigError(f"method {config.voting.part_name!r} is a protocol of its own and does not run on Flower")
    if config.evaluate != "test":
        raise ConfigError("evaluate='validation' needs clients' data on the server; use test data of your own")
    test = own_samples("test_data's ", *deployment.test_data())
    clients = Remote(config.clients, tensors_of(test.x)[0].shape[1:], deployment.classes)
    federation = Federation("flower", clients, None, 0, test, remote=True, population=settings.population)
    module = deployment.module() if deployment.module else None
    new = not folder.began()  # or one that ended while it waited for its nodes
    roster = Roster(folder.path / "nodes.json", settings.trust, settings.start_timeout, new)
    nodes = _MODELS[settings.trust](Exchange(grid, settings.deadline), roster, config)
    machine = Machine(device="cpu")
    if new:
        log(INFO, "a new run in %s: trust = %s", folder.path, settings.trust)
        run = train(
            config, out=folder.path, machine=machine, federation=federation, module=module, watch=_say,
            connect=nodes.connect, loss=deployment.loss,
        )  # fmt: skip
        return _said(run)
    stored = {key: value for key, value in folder.resolved().items() if key != "own"}
    changed = differences(stored, json.loads(canonical(to_dict(config))))
    if changed:
        raise RunError(f"{folder.path} holds a run of another configuration ({'; '.join(changed)}); choose another out")
    log(INFO, "resuming the run in %s", folder.path)
    run = resume(
        folder.path, machine=machine, federation=federation, module=module, watch=_say, connect=nodes.connect,
        tell=lambda note: log(INFO, "%s", note), loss=deployment.loss,
    )  # fmt: skip
    return _said(run)


def _said(run: Run) -> Run:
    """Log what the population has spent when the run has ended."""
    if run.record.privacy.population is not None:
        log(INFO, "%s", words_of_population(run.record.privacy.population))
    return run


def _say(row: Row) -> None:
    """Write one line a round to Flower's log, which `flwr run --stream` shows to the operator."""
    figures = "".join(f", {name} {value:.4f}" for name, value in figures_of(row).items())
    measured = f"{figures}, epsilon {row['epsilon']:.3f}" if figures else ""
    fate = "aborted and paid for" if "aborted" in row["local_only"] else "done"
    log(INFO, "round %d %s in %.1f s%s", row["round"], fate, row["seconds"], measured)
