"""Options that several commands share, each defined once, and what the shell completes after them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from fedblur.core.config import REFERENCES
from fedblur.core.errors import ConfigError
from fedblur.core.plugins import load_plugins
from fedblur.core.registry import Kind, parts


def complete(kind: Kind) -> Callable[[str], list[str]]:
    """Return a function that finds the parts of a kind that begin with what was typed, third parties' included."""

    def found(incomplete: str) -> list[str]:
        return [name for name in sorted(parts(kind)) if name.startswith(incomplete)]

    return found


def complete_method(incomplete: str) -> list[str]:
    """Return the methods that can follow: after `blur+`, any other one."""
    before, plus, last = incomplete.rpartition("+")
    names = {*parts("method"), *(() if plus else ("dp-fedavg", *parts("voting"), *REFERENCES))}
    used = before.split("+")
    return [f"{before}{plus}{name}" for name in sorted(names) if name.startswith(last) and name not in used]


def complete_recipe(incomplete: str) -> list[str]:
    return [name for name in ("best",) if name.startswith(incomplete)]


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Plugin = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin", metavar="FILE", is_eager=True, callback=lambda files: load_plugins(files or ()),
        help="A Python file that registers your own parts (it is executed); repeatable.",
    ),
]  # fmt: skip
Population = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of the people whose budget is charged. Not needed for public data."),
]
DataFile = Annotated[
    Path | None,
    typer.Option("--data", metavar="FILE", help="Your own rows: .csv, .tsv (also .gz), .parquet or .arrow."),
]
UserColumn = Annotated[str | None, typer.Option(metavar="COLUMN", help="With --data: whose row it is.")]
TargetColumn = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="With --data: what to predict; several numbers: A,B.")
]
FeatureColumns = Annotated[
    str | None, typer.Option(metavar="A,B", help="With --data: what to predict from (default: all other columns).")
]
TextColumn = Annotated[
    list[str] | None,
    typer.Option(metavar="COLUMN", help="With --data: text, whose words are hashed into 1024 features; repeatable."),
]
TimeColumn = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="With --data: the last rows of each user are held out for test.")
]
Classes = Annotated[
    int | None, typer.Option(help="With --data: the target is a whole number 0..CLASSES-1, a class and no number.")
]
SchemaFile = Annotated[
    str | None, typer.Option("--schema", metavar="FILE", help="With --data: categories and ranges, as TOML or JSON.")
]
SchemaFrom = Annotated[
    str | None, typer.Option(metavar="FILE", help="With --data: a public table to take categories and ranges from.")
]


def table_part(
    data: Path | None,
    user: str | None,
    target: str | None,
    features: str | None,
    text: list[str] | None,
    time: str | None,
    classes: int | None,
    schema: str | None,
    schema_from: str | None,
) -> dict[str, Any]:
    """Return the settings of `dataset = "table"` that flags give; none without flags."""
    several = None if target is None or "," not in target else [name.strip() for name in target.split(",")]
    given = {
        "path": None if data is None else str(data),
        "user": user,
        "target": several or target,
        "features": None if features is None else [name.strip() for name in features.split(",")],
        "text_columns": text or None,
        "time": time,
        "classes": classes,
        "schema": schema,
        "schema_from": schema_from,
    }
    return {key: value for key, value in given.items() if value is not None}


DataDir = Annotated[Path | None, typer.Option(help="Folder with data sets in the hub's layout.", envvar="FEDBLUR_DATA")]
RankTimeout = Annotated[float, typer.Option(help="Seconds that processes under torchrun wait for each other.")]

LoggerOption = Annotated[
    list[str] | None, typer.Option("--logger", metavar="NAME", help="tensorboard, mlflow or wandb; repeatable.")
]
LogLocalOnly = Annotated[
    bool,
    typer.Option("--log-local-only", help="Send figures that no noise protects to other machines, too. NOT PRIVATE."),
]

_MACHINE: dict[str, tuple[Any, Any]] = {  # name: (option, default)
    "data_dir": (DataDir, None),
    "device": (Annotated[str, typer.Option(help='Where to compute: "auto", "cpu", "cuda", "cuda:1".')], "auto"),
    "engine": (
        Annotated[
            str,
            typer.Option(
                help='How clients are trained: "auto" (the faster one), "vectorised" (in blocks), "sequential".',
                envvar="FEDBLUR_ENGINE",
            ),
        ],
        "auto",
    ),
    "precision": (
        Annotated[str, typer.Option(help='"auto" (bf16 on a GPU that supports it), "bf16", "fp32".')],
        "auto",
    ),
}


def on_machine(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say where to compute, in place of its parameter `machine`."""

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        from fedblur.engines.local import EngineName
        from fedblur.training.machine import Machine, Precision

        for name, known in (("engine", get_args(EngineName)), ("precision", get_args(Precision))):
            if given[name] not in known:
                raise ConfigError(f"{name}={given[name]!r} must be one of {', '.join(known)}")
        command(machine=Machine(**{name: given.pop(name) for name in _MACHINE}), **given)

    hints = get_type_hints(command, include_extras=True)
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        chosen = (
            _MACHINE if parameter.name == "machine" else {parameter.name: (hints[parameter.name], parameter.default)}
        )
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
            for name, (option, default) in chosen.items()
        ]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options
