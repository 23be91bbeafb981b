"""`fedblur data`: which data sets there are, fetching them, and what a federation looks like."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedblur.cli.options import (
    Classes,
    DataDir,
    FeatureColumns,
    Json,
    SchemaFile,
    SchemaFrom,
    TextColumn,
    TimeColumn,
    complete,
    table_part,
)
from fedblur.cli.output import print_json
from fedblur.core.config import apply_overrides
from fedblur.core.errors import ConfigError, DataError
from fedblur.core.files import cache_folder
from fedblur.core.registry import build, from_table, parts
from fedblur.data.cache import read_cached
from fedblur.data.dataset import Dataset, Described, Divided, Generated
from fedblur.data.federation import load_federation
from fedblur.data.packed import export as write_packed
from fedblur.data.summary import clients_to_see, label_counts, summarise
from fedblur.data.table import TableData, described
from fedblur.data.table_source import open_table
from fedblur.report.plots import check_suffix, draw_federation
from fedblur.report.progress import reading_bar

app = typer.Typer(help="List, fetch and inspect data sets.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(
        help="cifar10, digits, emnist, femnist, mnist, plays, synthetic, table.", show_default=False,
        autocompletion=complete("dataset"),
    ),
]  # fmt: skip
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="dataset.min_samples=50, partition.alpha=0.1, ..."),
]


@dataclass(frozen=True)
class _Request:
    """The keys that `--set` may name: the part of a run's configuration that decides its data."""

    dataset: Any  # a name or a table, as everywhere
    partition: Any = None
    clients: int | None = None
    validation_share: float = 0.1
    data_seed: int = 0


@app.command()
def describe(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Your own rows: .csv, .tsv, .parquet or .arrow.")],
    user_column: Annotated[str, typer.Option(metavar="COLUMN", help="Whose row it is.")],
    target_column: Annotated[str, typer.Option(metavar="COLUMN", help="What to predict; several numbers: A,B.")],
    feature_columns: FeatureColumns = None,
    text_column: TextColumn = None,
    time_column: TimeColumn = None,
    classes: Classes = None,
    schema: SchemaFile = None,
    schema_from: SchemaFrom = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="split=users, test_share=0.1.")
    ] = None,
    json_: Json = False,
) -> None:
    """Show what a table of your own would become: features by column, users, rows of a user.

    The figures come from the rows themselves. Use them to choose settings; do not release them.

    Example: `fedblur data describe ratings.csv --user-column reader --target-column stars`
    """
    flags = table_part(
        file, user_column, target_column, feature_columns, text_column, time_column, classes, schema, schema_from
    )
    part = build("dataset", {"name": "table", **apply_overrides(flags, set_ or [])})
    assert isinstance(part, TableData)
    table = open_table(file)
    with reading_bar(json_):
        data = part.divided(table, file.name, None, 0.0, 0)
    found = described(part, table, data)
    if json_:
        print_json(found)
        return
    rows = {
        "rows": f"{found['rows']:,} of {found['users']:,} users; {data.note}",
        "rows of a user": "min {min}, median {median:g}, mean {mean:.1f}, max {max} for training".format(
            **found["rows_of_a_user"]
        ),
        "target": f"{found['target']['columns']}: "
        + (f"{found['target']['classes']} classes" if found["target"]["classes"] else "numbers"),
    }
    inputs = [f"{name} {' x '.join(map(str, shape))}" for name, shape in found["inputs"].items()]
    rows["a sample"] = ", ".join(inputs)
    typer.echo("\n".join(f"{key:<20}{value}" for key, value in rows.items()))
    for name, words in found["columns"].items():
        typer.echo(f"  {name:<18}{words}")


@app.command("list")
def list_(data_dir: DataDir = None, json_: Json = False) -> None:
    """List all data sets, and whether they are here.

    Example: `fedblur data list`
    """
    found: list[Described] = [build("dataset", name) for name in sorted(parts("dataset"))]
    if json_:
        print_json(
            [
                {
                    "name": data.part_name,
                    "clients": _clients(data),
                    "partition": data.default_partition,
                    "here": data.place(data_dir),
                    "text": data.text,
                    "summary": data.summary,
                }
                for data in found
            ]
        )
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "clients", "partition", "here?", "what it is"):
        table.add_column(column, no_wrap=column != "what it is")
    for data in found:
        table.add_row(
            *map(escape, (data.part_name, _clients(data), data.default_partition, data.place(data_dir), data.summary))
        )
    Console().print(table)


def _clients(data: Described) -> str:
    by_writer = data.default_partition == "natural" and not isinstance(data, Generated)
    return "writers" if by_writer or data.default_clients is None else str(data.default_clients)


@app.command()
def fetch(name: Name, data_dir: DataDir = None, set_: Set = None, json_: Json = False) -> None:
    """Load a data set from the data folder or the hub, and keep it packed in the cache.

    Example: `fedblur data fetch femnist`
    """
    data = build("dataset", _request(name, None, set_).dataset)
    _demand_a_copy(data)
    if data.place(data_dir) == "built in":
        if json_:
            print_json({"name": name, "place": "built in"})
        else:
            typer.echo(f"{name} comes with fedblur: nothing to fetch")
        return
    assert isinstance(data, Dataset)
    before = data.place(data_dir)
    with Console(stderr=True).status(f"loading {name} ..."):
        raw = data.load(data_dir)
    if json_:
        people = None if raw.owners is None else int(raw.owners.max()) + 1
        found = {"train": len(raw.train), "test": len(raw.test), "natural_clients": people}
        print_json({"name": name, "place": data.place(data_dir), **found})
        return
    writers = "" if raw.owners is None else f", {int(raw.owners.max()) + 1:,} natural clients"
    typer.echo(f"{name}: {len(raw.train):,} training and {len(raw.test):,} test samples{writers}")
    cached = data.place(data_dir) == "cached"
    where = f"packed in {cache_folder()}" if cached else f"not packed: {cache_folder()} cannot be written"
    again = "; give the same data folder when you train" if before == "in the data dir" else ""
    typer.echo(where + again)


@app.command()
def export(
    name: Name,
    to: Annotated[Path, typer.Argument(metavar="DIR", help="The files go to DIR/NAME.")],
    data_dir: DataDir = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Write a data set in a compact format, for machines without the hub's library.

    Give --data-dir DIR there. All of the files are needed.

    Example: `fedblur data export femnist packed`
    """
    data = build("dataset", _request(name, None, set_).dataset)
    _demand_a_copy(data)
    source = data.source(data_dir) if isinstance(data, Dataset) else None
    if source is None:
        raise DataError(f"there is nothing to export: {name} is built in, or not in data_dir={str(data_dir)!r}")
    with Console(stderr=True).status(f"packing {name} ..."):
        written = write_packed(read_cached(data.cache_name, source), to / name)
    if json_:
        print_json([{"path": str(path), "bytes": path.stat().st_size} for path in written])
        return
    for path in written:
        typer.echo(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")


@app.command()
def show(
    name: Name,
    data_dir: DataDir = None,
    clients: Annotated[int | None, typer.Option(help="N, training clients.")] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help="natural, iid, dirichlet, dirichlet_classwise, shards.", autocompletion=complete("partition")
        ),
    ] = None,
    set_: Set = None,
    json_: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Draw sizes and labels into this file: .png, .svg or .pdf.")] = None,
) -> None:
    """Show how a data set is divided: clients, samples per client, label skew.

    The figures come from the clients' own data. Use them to choose settings; do not release them.

    Example: `fedblur data show digits --clients 100 --partition dirichlet`
    """
    if plot is not None:
        check_suffix(plot)
    request = _request(name, partition, set_)
    federation = load_federation(
        request.dataset,
        request.partition,
        clients if clients is not None else request.clients,
        request.validation_share,
        request.data_seed,
        data_dir,
    )
    if not federation.train.classes or federation.test.y.dim() != 1:
        raise ConfigError(f"{federation.name} has no class per sample; a table is shown by: fedblur data describe FILE")
    counts = label_counts(federation.train, clients_to_see(federation.train))
    summary = summarise(federation, counts)
    if plot is not None:
        draw_federation(summary, counts, plot)
    if json_:
        print_json(dataclasses.asdict(summary))
        return
    shape = " x ".join(map(str, summary.shape))
    rows = {
        "data set": f"{summary.name}, {summary.classes} classes, samples of shape {shape}",
        "note": summary.note,
        "training clients": f"{summary.train_clients:,}",
        "validation clients": f"{summary.validation_clients:,}, with {summary.validation_samples:,} samples",
        "test samples": f"{summary.test_samples:,}",
        "samples per client": f"min {summary.samples_min}, median {summary.samples_median:g}, "
        f"mean {summary.samples_mean:.1f}, max {summary.samples_max}",
        "classes per client": f"{summary.classes_per_client:.1f} of {summary.classes} on average",
        "label distance": f"{summary.label_distance:.3f} from the overall mix (mean total variation, 0 to 1)",
    }
    if summary.clients_seen < summary.train_clients:
        rows["looked at"] = f"{summary.clients_seen} training clients; the figures per client are of these"
    typer.echo("\n".join(f"{key:<20}{value}" for key, value in rows.items() if value))
    if plot is not None:
        typer.echo(f"drawn in {plot}")


def _demand_a_copy(data: Described) -> None:
    if isinstance(data, Divided):
        raise DataError(
            f"{data.part_name} is read where it lies: nothing is fetched or exported; fedblur data describe shows it"
        )


def _request(name: str, partition: str | None, assignments: Iterable[str] | None) -> _Request:
    table: dict[str, Any] = {"dataset": name, "partition": partition}
    wanted = list(assignments or ())
    if partition is None and any(item.startswith("partition.") for item in wanted):
        table["partition"] = build("dataset", name).default_partition
    request = from_table(_Request, apply_overrides(table, wanted))
    assert isinstance(request, _Request)
    return request
