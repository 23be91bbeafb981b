"""`fedblur data`: which data sets there are, fetching them, and what a federation looks like."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedblur.commands.names import complete
from fedblur.commands.run import Json
from fedblur.commands.terminal import print_json
from fedblur.config import apply_overrides
from fedblur.data.cache import cache_folder, read_cached
from fedblur.data.federation import load_federation
from fedblur.data.packed import export as write_packed
from fedblur.data.raw import Dataset, Described, Generated
from fedblur.data.summary import Summary, clients_to_see, label_counts, summarise
from fedblur.errors import DataError
from fedblur.registry import build, from_table, parts
from fedblur.report.data_plot import check_suffix, draw_federation

app = typer.Typer(help="List, fetch and look at data sets.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(
        help="cifar10, digits, emnist, femnist, mnist, plays, synthetic.", show_default=False,
        autocompletion=complete("dataset"),
    ),
]  # fmt: skip
DataDir = Annotated[Path | None, typer.Option(help="Folder with data sets in the hub's layout.", envvar="FEDBLUR_DATA")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="dataset.min_samples=50, partition.alpha=0.1, ..."),
]


@dataclass(frozen=True)
class _Request:
    """What `--set` may name: the part of a run's configuration that decides its data."""

    dataset: Any  # a name or a table, as everywhere
    partition: Any = None
    clients: int | None = None
    validation_share: float = 0.1
    data_seed: int = 0


@app.command("list")
def list_(data_dir: DataDir = None, json_: Json = False) -> None:
    """All data sets, and whether they are here."""
    if json_:
        print_json([_described(build("dataset", name), data_dir) for name in sorted(parts("dataset"))])
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "clients", "partition", "here?", "what it is"):
        table.add_column(column, no_wrap=column != "what it is")
    for name in sorted(parts("dataset")):
        data: Described = build("dataset", name)
        table.add_row(name, _clients(data), data.default_partition, data.place(data_dir), data.summary)
    Console().print(table)


def _described(data: Described, data_dir: Path | None) -> dict[str, Any]:
    return {
        "name": data.part_name,
        "clients": _clients(data),
        "partition": data.default_partition,
        "here": data.place(data_dir),
        "text": data.text,
        "summary": data.summary,
    }


def _clients(data: Described) -> str:
    by_writer = data.default_partition == "natural" and not isinstance(data, Generated)
    return "writers" if by_writer or data.default_clients is None else str(data.default_clients)


@app.command()
def fetch(name: Name, data_dir: DataDir = None, set_: Set = None, json_: Json = False) -> None:
    """Load a data set once, from the data folder or the hub, and keep it packed in the cache."""
    data = build("dataset", _request(name, None, set_).dataset)
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
    """Write a data set in a compact form of our own, for machines without the hub's library.

    There, give --data-dir DIR. The files can be copied one by one; all of them are needed.
    """
    data = build("dataset", _request(name, None, set_).dataset)
    source = data.source(data_dir) if isinstance(data, Dataset) else None
    if source is None:
        raise DataError(f"there is nothing to export: {name} is built in, or not in data_dir={str(data_dir)!r}")
    with Console(stderr=True).status(f"packing {name} ..."):
        written = write_packed(read_cached(name, source), to / name)
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
    plot: Annotated[Path | None, typer.Option(help="Draw sizes and labels: .png, .svg or .pdf.")] = None,
) -> None:
    """How a data set is divided: clients, samples per client, label skew.

    The figures come from the clients' own data: they are for choosing settings, not for release.
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
    counts = label_counts(federation.train, clients_to_see(federation.train))
    summary = summarise(federation, counts)
    if plot is not None:
        draw_federation(summary, counts, plot)
    if json_:
        print_json(dataclasses.asdict(summary))
        return
    typer.echo(_text(summary))
    if plot is not None:
        typer.echo(f"drawn in {plot}")


def _request(name: str, partition: str | None, assignments: Iterable[str] | None) -> _Request:
    table: dict[str, Any] = {"dataset": name, "partition": partition}
    wanted = list(assignments or ())
    if partition is None and any(item.startswith("partition.") for item in wanted):
        table["partition"] = build("dataset", name).default_partition
    request = from_table(_Request, apply_overrides(table, wanted))
    assert isinstance(request, _Request)
    return request


def _text(summary: Summary) -> str:
    s = summary
    rows = {
        "data set": f"{s.name}, {s.classes} classes, samples of shape {' x '.join(map(str, s.shape))}",
        "note": s.note,
        "training clients": f"{s.train_clients:,}",
        "validation clients": f"{s.validation_clients:,}, with {s.validation_samples:,} samples",
        "test samples": f"{s.test_samples:,}",
        "samples per client": f"min {s.samples_min}, median {s.samples_median:g}, mean {s.samples_mean:.1f}, "
        f"max {s.samples_max}",
        "classes per client": f"{s.classes_per_client:.1f} of {s.classes} on average",
        "label distance": f"{s.label_distance:.3f} from the overall mix (mean total variation, 0 to 1)",
    }
    if s.clients_seen < s.train_clients:
        rows["looked at"] = f"{s.clients_seen} training clients; the figures per client are of these"
    return "\n".join(f"{key:<20}{value}" for key, value in rows.items() if value)
