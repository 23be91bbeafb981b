"""`fedblur run` and `fedblur resume`: train one configuration, with a progress display and a summary at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console

from fedblur.commands.names import complete, complete_method, complete_recipe
from fedblur.commands.terminal import print_json
from fedblur.config import apply_overrides, from_dict, parse_value
from fedblur.engines.distributed import rank
from fedblur.engines.local import EngineName
from fedblur.errors import ConfigError
from fedblur.loggers import with_loggers
from fedblur.plugins import load_plugins, read_config
from fedblur.registry import parts
from fedblur.report.progress import RunProgress
from fedblur.report.statement import write_statement
from fedblur.report.text import print_summary
from fedblur.runfolder import default_folder
from fedblur.setup import Machine, Precision
from fedblur.train import Run, train
from fedblur.train import resume as resume_run
from fedblur.watching import Watcher

DatasetOption = Annotated[
    str | None,
    typer.Option(
        help="cifar10, digits, emnist, femnist, mnist, plays, synthetic; fedblur data list says which are here.",
        autocompletion=complete("dataset"),
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="char_mlp (text), cnn, glyphs, gn_cnn, gn_resnet, leaves, logistic, mlp, resnet18.",
        autocompletion=complete("model"),
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder with data sets in the hub's layout.", envvar="FEDBLUR_DATA")]
Device = Annotated[str, typer.Option(help='Where to compute: "auto", "cpu", "cuda", "cuda:1".')]
EngineOption = Annotated[
    str,
    typer.Option(help='"auto" (timed), "vectorised" (blocks of clients), "sequential".', envvar="FEDBLUR_ENGINE"),
]
PrecisionOption = Annotated[
    str, typer.Option("--precision", help='"auto" (bf16 on a GPU that has it), "bf16", "fp32".')
]
RankTimeout = Annotated[float, typer.Option(help="Under torchrun: seconds that processes wait for each other.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting: clip_norm=0.3, method.blur.strength=0.8."),
]
LoggerOption = Annotated[
    list[str] | None, typer.Option("--logger", metavar="NAME", help="tensorboard or mlflow, local only; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else on standard output.")]
Plugin = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin", metavar="FILE", is_eager=True, callback=lambda files: load_plugins(files or ()),
        help="A Python file that registers parts of your own (it is executed); repeatable.",
    ),
]  # fmt: skip
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")]


def run(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; without one, digits with the defaults.")] = None,
    dataset: DatasetOption = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help='"best": all settings that are not given, by rule (fedblur plan explains).',
            autocompletion=complete_recipe,
        ),
    ] = None,
    model: ModelOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            help='augment, balance, blur, gce, lus, prox, sam, joined: "blur+lus"; ae-dpfl, knn-dpfl; '
            "dp-fedavg (none of them); fedavg and clip-only (not private).",
            autocompletion=complete_method,
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Privacy target; the noise follows. inf: no noise.")] = None,
    delta: Annotated[str | None, typer.Option(help='A number, "1/N" or "N^-1.1".')] = None,
    rounds: Annotated[int | None, typer.Option(help="T, rounds of training.")] = None,
    sample_rate: Annotated[
        float | None, typer.Option(help="p, the chance of a client to take part in a round.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="N, training clients.")] = None,
    seed: Annotated[int | None, typer.Option(help="Reproducible and NOT PRIVATE; leave out for OS entropy.")] = None,
    set_: Set = None,
    plugin: Plugin = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: runs/DATASET-DATE-TIME).")] = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    engine: EngineOption = "auto",
    precision: PrecisionOption = "auto",
    rank_timeout: RankTimeout = 600.0,
    logger: LoggerOption = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model with user-level differential privacy.

    Flags win over the file, and --set wins over flags. The run folder holds the configuration, every round, the
    privacy ledger, checkpoints and the model.
    """
    table = _read(config)
    if {"base", "rows", "axes"} & table.keys():
        raise ConfigError(f"{config} is a table of runs; start it with: fedblur table {config}")
    flags = {
        "dataset": dataset, "model": model, "method": method, "epsilon": epsilon, "rounds": rounds,
        "delta": None if delta is None else parse_value(delta), "sample_rate": sample_rate, "clients": clients,
        "seed": seed, "recipe": recipe,
    }  # fmt: skip
    table |= {key: value for key, value in flags.items() if value is not None}
    resolved = from_dict(apply_overrides(table, set_ or []))
    folder = out or default_folder(resolved)
    machine = make_machine(device, engine, data_dir, precision, rank_timeout)
    with _watched(RunProgress(resolved.rounds, quiet or json_ or rank() > 0), logger, folder) as (progress, watch):
        done = train(resolved, out=folder, machine=machine, watch=watch, tell=progress.note)
    _show(done, json_)


def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    plugin: Plugin = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    engine: EngineOption = "auto",
    precision: PrecisionOption = "auto",
    rank_timeout: RankTimeout = 600.0,
    logger: LoggerOption = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped or killed, from its last whole checkpoint."""
    tell = Console(stderr=True).print
    machine = make_machine(device, engine, data_dir, precision, rank_timeout)
    with _watched(RunProgress(None, quiet or json_ or rank() > 0), logger, path) as (_, watch):
        done = resume_run(path, machine=machine, watch=watch, tell=tell)
    _show(done, json_)


@contextmanager
def _watched(display: RunProgress, loggers: list[str] | None, folder: Path) -> Iterator[tuple[RunProgress, Watcher]]:
    """The display and the loggers of a run; they are checked before anything starts."""
    names = loggers or [] if rank() == 0 else []
    with with_loggers(names, folder, display) as (watch, note), display as progress:
        if note:
            progress.note(note)
        yield progress, watch


def _read(path: Path | None) -> dict[str, Any]:
    """A configuration file: TOML as people write it, or the config.json of a run folder."""
    if path is None:
        return {}
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a TOML file, or go on with a run: fedblur resume {path}")
    if not path.exists() and str(path) in parts("dataset"):
        raise ConfigError(f"{path} is no file; did you mean --dataset {path}?")
    if path.suffix != ".json":
        return read_config(path)
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}; mend it, or write TOML") from None
    if not isinstance(table, dict):
        raise ConfigError(f'{path} holds a {type(table).__name__}; a configuration is an object: {{"rounds": 100}}')
    return table


def make_machine(
    device: str, engine: str, data_dir: Path | None, precision: str = "auto", rank_timeout: float = 600.0
) -> Machine:
    """Where to compute, from the flags of a command."""
    for name, value, known in (("engine", engine, get_args(EngineName)), ("precision", precision, get_args(Precision))):
        if value not in known:
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(known)}")
    return Machine(device, cast(EngineName, engine), data_dir, cast(Precision, precision), rank_timeout)


def _show(done: Run, as_json: bool) -> None:
    if rank() > 0:
        return
    if as_json:
        print_json({"run": str(done.path), **done.summary})
    else:
        print_summary(done, Console())
        Console(soft_wrap=True).print(privacy_line(done.path), highlight=False)


def privacy_line(run: Path, tuning: str = "") -> str:
    """Write a run's privacy statement; the claim in one line, and where the statement is."""
    made, path = write_statement(run, tuning=tuning)
    return f"Privacy: {made.one_line()}. Statement: {path} (.html, .json)"
