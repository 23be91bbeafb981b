"""Before anything is spent: do data, model and methods fit each other? In: a run's parts. Out: nothing, or an error.

Samples are images or numbers, or text: windows of tokens, stored as whole numbers (int16). A model for one would train
on the other without a complaint and learn nothing.
"""

from __future__ import annotations

import torch

from fedblur.config import Config
from fedblur.data.population import Federation, as_input, is_text
from fedblur.errors import ConfigError, ModelError


def check_fit(config: Config, data: Federation, named: bool) -> None:
    """Refuse parts that do not fit the samples. `named`: the model is the configuration's, not the user's own."""
    text = is_text(data.test.x)
    if named and text != reads_text(config.model):
        _check_named(config, data, text)
    if config.voting is not None:
        if text:
            raise ConfigError(
                f"method {config.voting.part_name!r} blurs samples, which {data.name} (text) cannot be; "
                'use a method of rounds: method = "dp-fedavg" or "blur+lus"'
            )
        return
    for method in config.method:  # on two samples, so that a round is not where a misfit shows
        method.view(as_input(data.test.x[:2]), torch.tensor(0), 0)


def reads_text(model: object) -> bool:
    """Whether a model part is for windows of tokens."""
    return bool(getattr(model, "reads_text", False))


def _check_named(config: Config, data: Federation, text: bool) -> None:
    name = config.model.part_name
    if text:
        raise ModelError(f'model {name!r} reads numbers, but {data.name} is text; set model = "char_mlp"')
    x = data.test.x
    if not (x.dtype == torch.float32 and bool((x == x.round()).all()) and 0 <= float(x.min()) <= float(x.max())):
        raise ModelError(f'model {name!r} reads text, but {data.name} has numbers; set model = "mlp" or "logistic"')
    if float(x.max()) >= data.train.classes:
        raise ModelError(
            f"model {name!r} reads tokens 0..{data.train.classes - 1}, but samples have {float(x.max()):g}; "
            "give classes=, the number of different tokens"
        )
