"""Rows of a table, read in batches with Arrow: files and data frames. In: a file or a frame. Out: Arrow batches.

No Python object is made for a row. A file is read anew at each pass, so that no more than a batch of it is in memory;
Arrow and Parquet files are memory-mapped. Only the columns that are asked for are read.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedblur.core.errors import DataError

_ROWS = 2**16  # of a batch
_CSV_BYTES = 2**23  # of a block
_TEXT = {".csv": ",", ".tsv": "\t"}
_ARROW = (".arrow", ".feather", ".ipc")
KINDS = ".csv, .tsv (also .gz), .parquet, .arrow or .feather"


def arrow(module: str = "pyarrow") -> Any:
    """Import a module of pyarrow, or say in a line what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError('reading tables needs pyarrow; run: pip install "fedblur[table]"') from None


class Table:
    """A table that can be read as often as one likes."""

    def __init__(
        self, name: str, columns: Sequence[str], batches: Callable[[Sequence[str], Mapping[str, Any]], Iterator[Any]],
        rows: int | None,
    ) -> None:  # fmt: skip
        self.name = name
        self.columns = list(columns)
        self.rows = rows  # None: not known before it is read
        self._batches = batches

    def batches(self, columns: Sequence[str], types: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Yield record batches of these columns. `types`: what text files hold in a column."""
        with _read(self.name, self.columns):
            yield from self._batches(columns, types or {})


@contextmanager
def _read(name: str, columns: Sequence[str] = ()) -> Iterator[None]:
    """Name the table, and a column of text, in what Arrow says."""
    pa = arrow()
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        place = re.match(r"In CSV column #(\d+): ", said)
        if place is not None and int(place[1]) < len(columns):  # Arrow counts those of the file
            said = f"column {columns[int(place[1])]!r}: {said.removeprefix(place[0])}"
            said += "; make all its values numbers, or say in a schema what it becomes"
        raise DataError(f"{name} cannot be read: {said}") from None


def open_table(given: Any, name: str = "") -> Table:
    """Return a table from a file's path, or from a frame of pandas, polars, pyarrow or Hugging Face datasets."""
    if isinstance(given, str | Path):
        return _open_file(Path(given).expanduser())
    kind, pa = type(given).__module__.partition(".")[0], arrow()
    name = name or f"a {type(given).__name__} of {kind}"
    with _read(name):
        if kind == "pandas":
            twice = given.columns[given.columns.duplicated()]
            if len(twice):
                raise DataError(f"the data frame has column {twice[0]!r} twice; rename one")
            odd = next((column for column in given.columns if not isinstance(column, str)), None)
            if odd is not None:
                raise DataError(f"the data frame's column {odd!r} has no name; give it one (columns are named by text)")
            names = [*given.columns]

            def pandas_batches(columns: Sequence[str], types: Mapping[str, Any]) -> Iterator[Any]:
                for start in range(0, len(given), _ROWS):
                    part = given.iloc[start : start + _ROWS][[*columns]]
                    yield from pa.Table.from_pandas(part, preserve_index=False).to_batches()

            return Table(name, names, pandas_batches, len(given))
        if kind == "polars":
            frame = given.collect() if type(given).__name__ == "LazyFrame" else given

            def polars_batches(columns: Sequence[str], types: Mapping[str, Any]) -> Iterator[Any]:
                for start in range(0, len(frame), _ROWS):
                    yield from frame.slice(start, _ROWS).select([*columns]).to_arrow().to_batches()

            return Table(name, frame.columns, polars_batches, len(frame))
        if kind == "datasets" and hasattr(given, "with_format"):
            if not hasattr(given, "column_names") or isinstance(given.column_names, dict):
                raise DataError("these are several splits; give one of them, like dataset['train']")

            def hub_batches(columns: Sequence[str], types: Mapping[str, Any]) -> Iterator[Any]:
                for part in given.select_columns([*columns]).with_format("arrow").iter(batch_size=_ROWS):
                    yield from part.to_batches()

            return Table(name, given.column_names, hub_batches, len(given))
        if kind == "pyarrow" and isinstance(given, pa.Table | pa.RecordBatch):
            whole = given if isinstance(given, pa.Table) else pa.Table.from_batches([given])
            return Table(
                name,
                whole.column_names,
                lambda columns, types: iter(whole.select([*columns]).to_batches(max_chunksize=_ROWS)),
                whole.num_rows,
            )
    raise DataError(
        f"{type(given).__name__} is no table; give a file ({KINDS}) or a frame of pandas, polars, pyarrow or datasets"
    )


def _open_file(path: Path) -> Table:
    if not path.exists():
        raise DataError(f"table {path} does not exist")
    if path.is_dir():
        raise DataError(f"table {path} is a folder; give a file ({KINDS})")
    ending = "".join(path.suffixes[-2:]).lower() if path.suffix.lower() == ".gz" else path.suffix.lower()
    if ending.removesuffix(".gz") in _TEXT:
        return _open_text(path, _TEXT[ending.removesuffix(".gz")])
    if ending == ".parquet":
        return _open_parquet(path)
    if ending in _ARROW:
        return _open_arrow(path)
    raise DataError(f"table {path}: the ending {path.suffix or '(none)'!r} is not known; give {KINDS}")


def _open_text(path: Path, delimiter: str) -> Table:
    csv, pa = arrow("pyarrow.csv"), arrow()
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)

    def reader(columns: Sequence[str] | None, types: Mapping[str, Any]) -> Any:
        return csv.open_csv(
            pa.input_stream(str(path), compression="detect"),
            read_options=csv.ReadOptions(block_size=_CSV_BYTES),
            parse_options=parse,
            convert_options=csv.ConvertOptions(column_types=dict(types), include_columns=columns and [*columns]),
        )

    def batches(columns: Sequence[str], types: Mapping[str, Any]) -> Iterator[Any]:
        yield from reader(columns, types)

    with _read(str(path)):
        names = reader(None, {}).schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"table {path} has column {twice!r} twice in its first line; rename one")
    return Table(str(path), names, batches, None)


def _open_parquet(path: Path) -> Table:
    parquet = arrow("pyarrow.parquet")
    with _read(str(path)):
        found = parquet.ParquetFile(str(path), memory_map=True)
        names, rows = found.schema_arrow.names, found.metadata.num_rows

    def batches(columns: Sequence[str], types: Mapping[str, Any]) -> Iterator[Any]:
        with parquet.ParquetFile(str(path), memory_map=True) as file:
            yield from file.iter_batches(batch_size=_ROWS, columns=[*columns])

    return Table(str(path), names, batches, rows)


def _open_arrow(path: Path) -> Table:
    pa = arrow()

    def parts() -> tuple[list[str], Iterator[Any]]:
        """Return the names, and the batches of either of Arrow's two formats."""
        mapped = pa.memory_map(str(path))
        try:
            file = pa.ipc.open_file(mapped)
            return file.schema.names, (file.get_batch(number) for number in range(file.num_record_batches))
        except pa.ArrowInvalid:
            stream = pa.ipc.open_stream(pa.memory_map(str(path)))
            return stream.schema.names, iter(stream)

    def batches(columns: Sequence[str], types: Mapping[str, Any]) -> Iterator[Any]:
        for batch in parts()[1]:
            for start in range(0, batch.num_rows, _ROWS):
                yield batch.slice(start, _ROWS).select([*columns])

    with _read(str(path)):
        return Table(str(path), parts()[0], batches, None)
