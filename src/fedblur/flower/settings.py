"""The deployment that an app describes in Python, and its settings in `[tool.flwr.app.config]`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedblur.core.config import read_toml
from fedblur.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from torch import nn

    from fedblur.core.config import Config
    from fedblur.learning.tasks import Loss

Trust = Literal["central", "secure-sum"]
TRUST: tuple[Trust, ...] = ("central", "secure-sum")
Arrays = tuple[Any, Any]  # samples and labels, numpy arrays or tensors


@dataclass(frozen=True)
class Deployment:
    """A federation's task: what server and clients have in common, and how each finds its data."""

    config: Path  # a FedBlur configuration; `clients` is the number of nodes
    shape: tuple[int, ...] | Mapping[str, tuple[int, ...]]  # of one sample, or of each of its inputs by name
    classes: int  # how many classes, tokens or items targets are of; 0 where they are numbers
    client_data: Callable[[Mapping[str, Any]], Arrays]  # node configuration -> this node's own samples and targets
    test_data: Callable[[], Arrays]  # on the server: samples that belong to nobody in the federation
    module: Callable[[], nn.Module] | None = None  # None: the configuration's model
    loss: Loss | None = None  # (outputs, targets) -> [samples], a task of your own; None: the configuration's

    def configuration(self) -> Config:
        """Return the configuration that `config` names."""
        from fedblur.core.config import from_dict, read_toml  # at first use: most messages to a node need neither
        from fedblur.training.loop import with_loss

        table = read_toml(self.config)
        if "recipe" not in table:
            return with_loss(from_dict(table), self.loss)
        from fedblur.experiments.recipe import configure  # which needs plans

        return with_loss(configure(table), self.loss)


@dataclass(frozen=True)
class Settings:
    """The settings of a federation."""

    trust: Trust = "central"
    deadline: float = 600.0  # seconds that a node has for an answer
    start_timeout: float = 600.0  # seconds to wait for all nodes before the first round
    out: str = "run"  # the run folder, on the server
    population: str | None = None  # whose budget the run is charged to; None: that of the configuration

    def __post_init__(self) -> None:
        if self.trust not in TRUST:
            raise ConfigError(f"trust={self.trust!r} is unknown: {nearest(str(self.trust), TRUST)}")
        for name in ("deadline", "start_timeout"):
            if not 0 < getattr(self, name) < 1e7:
                raise ConfigError(f"{name.replace('_', '-')}={getattr(self, name)!r} must be above 0 seconds")

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Settings:
        """Read an app's configuration; a key that is not ours is the app's own business."""
        names = {name: name.replace("_", "-") for name in cls.__dataclass_fields__}
        known: dict[str, Any] = {name: table[key] for name, key in names.items() if key in table}
        try:
            known.update((name, float(known[name])) for name in ("deadline", "start_timeout") if name in known)
        except (TypeError, ValueError):
            raise ConfigError("deadline and start-timeout must be numbers of seconds") from None
        return cls(**known)


def min_cohort(path: Path) -> int:
    """Return m of a configuration without building its parts: most questions of a secure sum need only this."""
    part = read_toml(path).get("mechanism")
    least = part.get("min_cohort") if isinstance(part, dict) else None
    if type(least) is not int or least < 2:
        raise ConfigError(
            f'{path.name}: mechanism.min_cohort={least!r} must be 2 or more for trust = "secure-sum": noise shares are '
            "sized for so many nodes, and a round with fewer is aborted"
        )
    return least


def demand_trust(run: Mapping[str, Any], node: Mapping[str, Any]) -> Trust:
    """Return this node's trust model. A node may insist on one: `--node-config 'trust="secure-sum"'`."""
    asked = Settings.read(run).trust
    wanted = node.get("trust", asked)
    if wanted != asked:
        raise ConfigError(f"this node takes part with trust={wanted!r} only, and the run asks for {asked!r}")
    return asked
