"""`fedblur run` and `fedblur resume`: train one configuration, with a progress display and a summary at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedblur.cli.options import (
    Classes,
    DataFile,
    FeatureColumns,
    Json,
    LoggerOption,
    LogLocalOnly,
    Plugin,
    Population,
    Quiet,
    RankTimeout,
    SchemaFile,
    SchemaFrom,
    TargetColumn,
    TextColumn,
    TimeColumn,
    UserColumn,
    complete,
    complete_method,
    complete_recipe,
    on_machine,
    table_part,
)
from fedblur.cli.output import print_json
from fedblur.core.callbacks import Watcher
from fedblur.core.config import apply_overrides, parse_value
from fedblur.core.errors import ConfigError
from fedblur.core.files import each_key_once, read_bytes
from fedblur.core.plugins import read_config
from fedblur.core.registry import parts
from fedblur.engines.distributed import rank
from fedblur.experiments.recipe import configure
from fedblur.report.loggers import Occasion, with_loggers
from fedblur.report.progress import RunProgress
from fedblur.report.statement import read_statement
from fedblur.report.text import print_summary
from fedblur.training.loop import Run, train
from fedblur.training.machine import Machine
from fedblur.training.resume import resume as resume_run
from fedblur.training.run_folder import default_folder

DatasetOption = Annotated[
    str | None,
    typer.Option(
        help="cifar10, digits, emnist, femnist, mnist, plays, synthetic; fedblur data list shows which are here. "
        "table: your own rows, see --data.",
        autocompletion=complete("dataset"),
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="char_gru and char_mlp (text), cnn, glyphs, gn_cnn, gn_resnet, leaves, logistic, mlp, resnet18.",
        autocompletion=complete("model"),
    ),
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        help="What is learned: classification (default), binary, multilabel, next_token, ranking, regression.",
        autocompletion=complete("task"),
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting: clip_norm=0.3, method.blur.strength=0.8."),
]


@on_machine
def run(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; without one, digits with the defaults.")] = None,
    dataset: DatasetOption = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help='"best": choose all settings that are not given, by rule (fedblur plan explains them).',
            autocompletion=complete_recipe,
        ),
    ] = None,
    model: ModelOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            help='augment, balance, blur, fedrep, gce, lus, prox, sam, joined: "blur+lus"; ae-dpfl, knn-dpfl; '
            "dp-fedavg (none of them); fedavg and clip-only (not private).",
            autocompletion=complete_method,
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Privacy target, which decides the noise; inf: no noise.")
    ] = None,
    delta: Annotated[str | None, typer.Option(help='A number, "1/N" or "N^-1.1".')] = None,
    rounds: Annotated[int | None, typer.Option(help="T, rounds of training.")] = None,
    sample_rate: Annotated[float | None, typer.Option(help="p, the probability that a client joins a round.")] = None,
    clients: Annotated[int | None, typer.Option(help="N, training clients.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Makes the run reproducible and NOT PRIVATE; leave it out to protect people.")
    ] = None,
    task: TaskOption = None,
    data: DataFile = None,
    user_column: UserColumn = None,
    target_column: TargetColumn = None,
    feature_columns: FeatureColumns = None,
    text_column: TextColumn = None,
    time_column: TimeColumn = None,
    classes: Classes = None,
    schema: SchemaFile = None,
    schema_from: SchemaFrom = None,
    population: Population = None,
    set_: Set = None,
    plugin: Plugin = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: runs/DATASET-DATE-TIME).")] = None,
    *,
    machine: Machine,
    rank_timeout: RankTimeout = 600.0,
    logger: LoggerOption = None,
    log_local_only: LogLocalOnly = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model with user-level differential privacy.

    Flags override the file, and --set overrides flags. The run folder holds the configuration, every round, the
    privacy ledger, checkpoints and the model.

    Example: `fedblur run --dataset digits --method blur+lus --epsilon 2 --rounds 100`
    """
    table = _read(config)
    if {"base", "rows", "axes"} & table.keys():
        raise ConfigError(f"{config} is a table of runs; start it with: fedblur table {config}")
    flags = {
        "dataset": dataset, "model": model, "method": method, "epsilon": epsilon, "rounds": rounds,
        "delta": None if delta is None else parse_value(delta), "sample_rate": sample_rate, "clients": clients,
        "seed": seed, "recipe": recipe, "population": population, "task": task,
    }  # fmt: skip
    table |= {key: value for key, value in flags.items() if value is not None}
    own = table_part(
        data, user_column, target_column, feature_columns, text_column, time_column, classes, schema, schema_from
    )
    if own:
        table["dataset"] = _own_rows(table.get("dataset"), own)
    resolved = configure(apply_overrides(table, set_ or []))
    folder = out or default_folder(resolved)
    machine = replace(machine, rank_timeout=rank_timeout)
    with _watched(
        RunProgress(resolved.rounds, quiet or json_ or rank() > 0), logger, Occasion(folder, local_only=log_local_only)
    ) as (progress, watch):
        done = train(resolved, out=folder, machine=machine, watch=watch, tell=progress.note)
    _show(done, json_)


def _own_rows(dataset: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the data set that --data and its flags name; they override what the file says of a table."""
    there = dataset if isinstance(dataset, dict) and dataset.get("name") == "table" else None
    if there is None and "path" not in flags:
        raise ConfigError('flags about columns need --data FILE (or dataset = { name = "table", … } in the file)')
    if dataset not in (None, "table") and there is None:
        raise ConfigError(f"--data and dataset={dataset!r} are both given; keep one")
    return {**(there or {"name": "table"}), **flags}


@on_machine
def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    plugin: Plugin = None,
    *,
    machine: Machine,
    rank_timeout: RankTimeout = 600.0,
    logger: LoggerOption = None,
    log_local_only: LogLocalOnly = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run that was stopped or killed, from its last complete checkpoint.

    Example: `fedblur resume runs/digits-20260101-120000`
    """
    console = Console(stderr=True)
    machine = replace(machine, rank_timeout=rank_timeout)
    with _watched(
        RunProgress(None, quiet or json_ or rank() > 0), logger, Occasion(path, local_only=log_local_only)
    ) as (_, watch):
        done = resume_run(path, machine=machine, watch=watch, tell=lambda line: console.print(line, markup=False))
    _show(done, json_)


@contextmanager
def _watched(
    display: RunProgress, loggers: list[str] | None, occasion: Occasion
) -> Iterator[tuple[RunProgress, Watcher]]:
    """Return the display and the loggers of a run; they are checked before anything starts."""
    names = loggers or [] if rank() == 0 else []
    with with_loggers(names, occasion, display) as (watch, note), display as progress:
        if note:
            progress.note(note)
        yield progress, watch


def _read(path: Path | None) -> dict[str, Any]:
    """Read a configuration file: TOML as people write it, or the config.json of a run folder."""
    if path is None:
        return {}
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a TOML file, or continue the run in it: fedblur resume {path}")
    if not path.exists() and str(path) in parts("dataset"):
        raise ConfigError(f"{path} is not a file; did you mean --dataset {path}?")
    if path.suffix != ".json":
        return read_config(path)
    try:
        table = json.loads(read_bytes(path, way_out="give a TOML file"), object_pairs_hook=each_key_once)
    except RecursionError:
        raise ConfigError(f"{path} is not valid JSON: it is nested too deeply; fix it, or write TOML") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}; fix it, or write TOML") from None
    if not isinstance(table, dict):
        raise ConfigError(f'{path} holds a {type(table).__name__}; a configuration is an object: {{"rounds": 100}}')
    return table


def _show(done: Run, as_json: bool) -> None:
    if rank() > 0:
        return
    if as_json:
        print_json({"run": str(done.path), **done.summary})
    else:
        print_summary(done.path, done.record, Console())
        Console(soft_wrap=True).print(read_statement(done.path).shown(), markup=False, highlight=False)
