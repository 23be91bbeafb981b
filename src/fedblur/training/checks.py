"""Checks before anything is spent: arguments from Python, parts that do not fit each other, settings to warn about."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedblur.core.callbacks import Row
from fedblur.core.config import Config
from fedblur.core.errors import ConfigError, ModelError
from fedblur.data.population import Federation, Packed, as_input, each_input, is_text, one_input
from fedblur.learning.metrics import metrics_of
from fedblur.learning.tasks import Classification
from fedblur.privacy.accounting import PrivacyPlan
from fedblur.privacy.planning import signal_to_noise
from fedblur.training.machine import Machine

_SLACK = 1 + 1e-9  # 1/N itself is the usual choice
_WANTED = {
    "config": (Config, 'a fedblur.Config, like fedblur.Config(dataset="digits", epsilon=2.0)'),
    "machine": (Machine, 'a fedblur.Machine, like fedblur.Machine(device="cpu")'),
    "federation": (Federation, "what fedblur.federation_from_arrays or fedblur.load_federation gives"),
    "module": (nn.Module, "an nn.Module (an instance, not its class)"),
}


def check_arguments(
    config: Any, machine: Any, federation: Any, module: Any,
    trainable: Any = None, loss: Any = None, on_evaluate: Any = None,
) -> None:  # fmt: skip
    """Check the arguments of `train` and `resume`; None is left to their defaults."""
    given = {"config": config, "machine": machine, "federation": federation, "module": module}
    for name, value in given.items():
        kind, words = _WANTED[name]
        if value is not None and not isinstance(value, kind):
            what = value.__name__ if isinstance(value, type) else type(value).__name__
            raise ConfigError(f"{name}={what} must be {words}")
    if trainable is not None and (
        isinstance(trainable, str) or not trainable or not all(isinstance(each, str) for each in trainable)
    ):
        raise ConfigError(f"trainable={trainable!r} must be a list of patterns of names, like ['*.lora_*', 'head.*']")
    if trainable is not None and config is not None and config.voting is not None:
        raise ConfigError("trainable= is for rounds: voters train the whole model; set requires_grad on its parameters")
    for name, value in {"loss": loss, "on_evaluate": on_evaluate}.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name}={value!r:.80} must be a function")
    if config is not None and federation is not None and config.clients not in (None, federation.train.clients):
        raise ConfigError(
            f"clients={config.clients} has no effect on data of your own, which have {federation.train.clients} "
            "training clients: leave it out, or take fewer where you make them"
        )


def check_fit(config: Config, data: Federation, named: bool) -> None:
    """Refuse parts that do not fit the samples. `named`: the model is the configuration's, not the user's own."""
    text = is_text(data.test.x)
    if named and text != reads_text(config.model):
        name, x = config.model.part_name, one_input(data.test.x, f"model {config.model.part_name!r}")
        if text:
            raise ModelError(f'model {name!r} reads numbers, but {data.name} is text; set model = "char_mlp"')
        tokens = x.dtype in (torch.int64, torch.int32) or (x.dtype == torch.float32 and bool((x == x.round()).all()))
        if not tokens or float(x.min()) < 0:
            raise ModelError(f'model {name!r} reads text, but {data.name} has numbers; set model = "mlp" or "logistic"')
        if float(x.max()) >= data.train.classes:
            raise ModelError(
                f"model {name!r} reads tokens 0..{data.train.classes - 1}, but samples have {float(x.max()):g}; "
                "give classes=, the number of different tokens"
            )
    if config.voting is not None:
        if text:
            raise ConfigError(
                f"method {config.voting.part_name!r} blurs samples, which {data.name} (text) cannot be; "
                'use a method of rounds: method = "dp-fedavg" or "blur+lus"'
            )
        return
    for method in config.method:  # on two samples, so that a round is not where a misfit shows
        method.view(as_input(each_input(data.test.x, lambda x: x[:2])), torch.tensor(0), 0)


def check_targets(config: Config, data: Federation) -> None:
    """Refuse targets that are not the task's, of held-out data and of clients, before a model is made for them."""
    task, classes = config.task, data.train.classes
    task.check_targets("the test data's target", data.test.y, classes)
    if isinstance(data.train, Packed) and not isinstance(task, Classification):  # whose targets Packed has checked
        task.check_targets("a client's target", data.train.y, classes)


def check_task(config: Config, data: Federation, outputs: Tensor) -> None:
    """Refuse targets, a loss and metrics that do not fit each other. `outputs`: of a few samples."""
    task, y = config.task, data.test.y
    few = y[: len(outputs)].to(outputs.device)
    outputs = outputs[: len(few)]
    try:
        with torch.no_grad():
            losses = task.loss(outputs, few)
    except ConfigError:
        raise
    except Exception as error:  # whatever a foreign loss raises, the user needs the same one line
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"task {task.part_name!r} cannot compare outputs {[*outputs.shape[1:]]} with targets {[*few.shape[1:]]}: "
            f"{reason}"
        ) from error
    if losses.shape != (len(few),):
        raise ConfigError(
            f"the loss of task {task.part_name!r} has shape {[*losses.shape]} for {len(few)} samples; it must be one "
            "number for each, [samples]"
        )
    for metric in metrics_of(task, config.metrics):
        metric.check(outputs, y.to(outputs.device))


def reads_text(model: object) -> bool:
    """Return whether a model part is for windows of tokens."""
    return bool(getattr(model, "reads_text", False))


def cautions(plan: PrivacyPlan, clients: int, parameters: int) -> list[str]:
    """Return warnings about a plan; none for a plan without noise, which has a warning of its own."""
    lines: list[str] = []
    if not plan.noise_multiplier:
        return lines
    if plan.delta * clients > _SLACK:
        lines.append(
            f"delta={plan.delta:g} is above 1/N={1 / clients:.3g}: it permits releasing a random client; "
            'set delta = "1/N" or "N^-1.1"'
        )
    ratio = signal_to_noise(plan, parameters)
    if ratio < 1:
        lines.append(
            f"R = {ratio:.2g}: the noise exceeds the largest possible signal, which may cost much; raise epsilon or "
            "sample_rate, or take a smaller model (fedblur plan compares)"
        )
    return lines


def note_divergence(row: Row, config: Config, protects: bool) -> str:
    """Return what is wrong with a round without a finite update. Single ones count as zero; all are a mistake.

    A run that protects people continues all the same: with one client more, whose update is finite, it would not
    have stopped. Only the operator is notified, by the row.
    """
    local_only = row["local_only"]
    if not local_only["cohort"] or local_only["refused"] != local_only["cohort"]:
        return ""
    words = (
        f"all {local_only['cohort']} updates of round {row['round']} were NaN or infinite and counted as zero; "
        f"lower local.learning_rate={config.local.learning_rate:g} or check the data"
    )
    if protects:
        local_only["caution"] = f"{words} (the run goes on: that it stopped would tell about clients)"
    return words
