"""A data set from a table with a column of users. In: rows, a schema. Out: a Federation, grouped by user.

Two passes with Arrow and no Python object for a row: the first reads users (and times), and decides for each row where
it goes; the second turns columns into features and writes them there.

Formal guarantee: a user's features, its role, and which of its rows are held out follow from its own rows, its own id
and public settings. The shape of a sample and the number of classes follow from public settings alone. So one user who
joins, leaves or changes their rows changes nobody else's data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedblur.core.callbacks import LOADING
from fedblur.core.errors import ConfigError, DataError
from fedblur.core.registry import register
from fedblur.data.dataset import Divided, Form
from fedblur.data.holdout import check_share
from fedblur.data.population import Federation, Inputs, Packed, Samples
from fedblur.data.roles import divide, identities, members_of
from fedblur.data.source import Place
from fedblur.data.table_columns import (
    MissingValue,
    Reader,
    Target,
    as_text,
    input_names,
    missing_in,
    refuse_missing,
    width_of,
)
from fedblur.data.table_public import public_schema
from fedblur.data.table_schema import Column, choose, read_schema
from fedblur.data.table_source import Table, arrow, open_table

Split = Literal["rows", "users"]
_WORDS = 1024  # features of a text column that no schema describes
_MOST_ROWS = 2**28  # a small file can stand for any number of rows
_TRAIN, _VALIDATION, _TEST, _NOWHERE = range(4)


@register("dataset", "table")
@dataclass(frozen=True)
class TableData(Divided):
    """The rows of a file, each owned by a user."""

    path: str = ""  # .csv, .tsv (also .gz), .parquet, .arrow or .feather
    user: str = ""  # the column that says whose row it is
    target: Any = ""  # the column to predict; several, all numbers: a list
    features: tuple[str, ...] | None = None  # columns to predict from; None: all others
    text_columns: tuple[str, ...] = ()  # features that are text: words hashed into 1024 features (others: the schema)
    time: str | None = None  # orders a user's rows; the last ones are held out
    classes: int | None = None  # of a target that is a whole number 0..classes-1; None: from the schema, or numbers
    schema: Any = None  # what columns become: a file (TOML, JSON), or a table by column
    schema_from: str | None = None  # a public file, for categories and ranges that the schema does not give
    split: Split = "rows"  # what is held out: rows of each user, or whole users
    test_share: float = 0.2  # how much of it

    default_partition: ClassVar[str] = "natural"
    default_clients: ClassVar[int | None] = None
    summary: ClassVar[str] = "your own rows: CSV, Parquet or Arrow with a column of users"

    def __post_init__(self) -> None:
        check_share("dataset.table.test_share", self.test_share)
        if isinstance(self.target, list | tuple):
            object.__setattr__(self, "target", tuple(map(str, self.target)))
        elif not isinstance(self.target, str):
            raise ConfigError(f"dataset.table.target={self.target!r} must be a column, or a list of columns")
        object.__setattr__(self, "schema", read_schema(self.schema))
        if self.schema_from is not None:  # from here on the schema itself is what counts, and what is written down
            object.__setattr__(self, "schema", self.with_public(self.schema_from).schema)
            object.__setattr__(self, "schema_from", None)

    def with_public(self, given: Any) -> TableData:
        """Return these settings with what a public table says of columns that the schema leaves out."""
        if given is None:
            return self
        public = open_table(given)
        wanted = self._columns(public.columns, strict=False)
        found = public_schema(public, wanted, self.schema, self.targets, self.text_columns)
        return replace(self, schema=found, schema_from=None)

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,) if isinstance(self.target, str) else self.target

    def place(self, data_dir: Path | None) -> Place:
        return "in the data dir" if self.path and Path(self.path).expanduser().exists() else "needs fetch"

    def form(self) -> Form | None:
        if not self.path or not Path(self.path).expanduser().exists():
            return None
        reading = Reading.of(self, open_table(self.path))
        numbers = [*reading.inputs] == ["numbers"] and reading.target.count > 0
        return ((width_of(reading.columns),), reading.target.count) if numbers else None

    def federation(self, clients: int | None, validation_share: float, seed: int, data_dir: Path | None) -> Federation:
        """Read the file and divide it by user."""
        if not self.path:
            raise ConfigError('dataset "table" needs a file: dataset = { name = "table", path = "…", user = "…", … }')
        given = Path(self.path).expanduser()
        if not given.exists() and data_dir is not None and (Path(data_dir) / given).exists():
            given = Path(data_dir) / given
        return self.divided(open_table(given), given.name.partition(".")[0], clients, validation_share, seed)

    def divided(self, table: Table, name: str, clients: int | None, validation_share: float, seed: int) -> Federation:
        """Return the federation of a table that is open."""
        reading = Reading.of(self, table)
        rows = reading.group(validation_share, seed, clients)
        return reading.federation(name, rows)

    def _columns(self, there: Sequence[str], strict: bool = True) -> list[str]:
        """Return the columns of features. `strict`: refuse names that are not there."""
        for what, name in (("user", self.user), *(("target", target) for target in self.targets)):
            if not name:
                raise ConfigError(f'dataset.table.{what} is missing: name the column, like {what} = "{there[0]}"')
            if strict:
                choose(there, [name], what)
        named = [*(self.features or ()), *self.text_columns, *(() if self.time is None else (self.time,))]
        if strict:
            choose(there, named, "column")
            choose(there, [column.name for column in self.schema], "schema column")
        if self.user in (*self.targets, *(self.features or ()), *self.text_columns):
            raise ConfigError(f"column {self.user!r} says who a user is, so it is no feature and no target")
        aside = {self.user, self.time, *self.targets}
        chosen = [name for name in there if name not in aside] if self.features is None else [*self.features]
        chosen += [name for name in self.text_columns if name not in chosen]
        twice = next((name for name in chosen if chosen.count(name) > 1), None)
        if twice is not None or not chosen:
            what = f"column {twice!r} is named twice" if twice is not None else "no column is left to predict from"
            raise ConfigError(f"{what}; choose features=[...] (--feature-columns)")
        return chosen


@dataclass(frozen=True)
class Rows:
    """The place of each row of the file in the federation."""

    part: NDArray[np.int8]  # [rows]: training, validation, test, or nowhere
    place: NDArray[np.int64]  # [rows]: in its part's arrays
    counts: tuple[int, int, int]  # rows of training, validation and test
    train_sizes: Tensor  # [training clients]
    validation_sizes: Tensor
    test_owners: Tensor  # [test rows]: the training client whose row it is; -1: nobody's
    names: list[str]  # of all users


@dataclass(frozen=True)
class Reading:
    """A table, and what its columns become."""

    settings: TableData
    table: Table
    inputs: dict[str, list[Column]]
    target: Target
    types: dict[str, Any]  # what a text file holds

    @classmethod
    def of(cls, settings: TableData, table: Table) -> Reading:
        """Check the columns against the table's."""
        pa = arrow()
        chosen = settings._columns(table.columns)
        known = {column.name: column for column in settings.schema}
        known = {name: Column(name, words=_WORDS) for name in settings.text_columns} | known
        target = Target(tuple(known.get(name, Column(name)) for name in settings.targets), settings.classes, table.name)
        types: dict[str, Any] = {settings.user: pa.large_string()}
        for column in (*(known.get(name, Column(name)) for name in chosen), *target.columns):
            if column.text:
                types[column.name] = pa.large_string()
            elif column.range is not None:
                types[column.name] = pa.float64()
        rest = [name for name in dict.fromkeys([*chosen, *settings.targets]) if name not in types]
        if rest:  # what Arrow takes for whole numbers in the first rows may have decimals later
            first = next(iter(table.batches(rest, {})), None)
            kinds = {} if first is None else {field.name: field.type for field in first.schema}
            numbers = (name for name, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_null(kind))
            types |= dict.fromkeys(numbers, pa.float64())
        inputs = input_names([known.get(name, Column(name)) for name in chosen])
        return cls(settings, table, inputs, target, types)

    @property
    def columns(self) -> list[Column]:
        return [column for group in self.inputs.values() for column in group]

    def group(self, validation_share: float, seed: int, most: int | None) -> Rows:
        """Read users and times, and decide where each row goes."""
        codes, names = self._users()
        order, start_of, sizes = _grouped(codes, len(names), self._times(len(codes)))
        rank = np.arange(len(codes)) - np.repeat(start_of, sizes)  # of a row among its user's, in this order
        by_users = self.settings.split == "users"
        kept = torch.arange(len(names))
        if by_users:
            kept, _ = divide([f"test {name}" for name in names], self.settings.test_share, 0)
        some = [names[user] for user in kept.tolist()]
        train, validation = divide(some, validation_share, seed, most)
        role = np.full(len(names), _TEST if by_users else _NOWHERE, dtype=np.int8)
        role[kept.numpy()] = _NOWHERE
        role[kept[train].numpy()] = _TRAIN
        role[kept[validation].numpy()] = _VALIDATION
        self._demand_some(role, len(names), validation_share)
        part = role[codes[order]]
        if not by_users:
            share = self.settings.test_share
            held = np.floor(share * sizes + 1e-9).astype(np.int64)
            if self.settings.time is None:  # by lot, from the user's own name: who else is there changes nothing
                lots = _lots(identities(names).numpy(), codes[order], rank)
                by_lot = np.lexsort((lots, codes[order]))
                rank[by_lot] = np.arange(len(codes)) - np.repeat(start_of, sizes)
            last = rank >= np.repeat(sizes - held, sizes)
            part[(part == _TRAIN) & last] = _TEST
        if not (part == _TEST).any():
            raise DataError(
                f"test_share={self.settings.test_share} of {self.table.name} holds no row out: no user has enough "
                'rows; raise it, or hold out whole users: split = "users"'
            )
        number = np.full(len(names), -1, dtype=np.int64)
        number[role == _TRAIN] = np.arange(int((role == _TRAIN).sum()))
        place = np.empty(len(codes), dtype=np.int64)
        which = np.empty(len(codes), dtype=np.int8)
        which[order] = part
        counts = []
        for each in (_TRAIN, _VALIDATION, _TEST):
            mine = order[part == each]
            place[mine] = np.arange(len(mine))
            counts.append(len(mine))
        owned = codes[order]
        return Rows(
            which, place, (counts[0], counts[1], counts[2]),
            torch.from_numpy(np.bincount(number[owned[part == _TRAIN]], minlength=int((role == _TRAIN).sum()))),
            torch.from_numpy(np.bincount(owned[part == _VALIDATION], minlength=len(names))[role == _VALIDATION]),
            torch.from_numpy(number[owned[part == _TEST]]), names,
        )  # fmt: skip

    def _demand_some(self, role: NDArray[np.int8], users: int, share: float) -> None:
        if not (role == _TRAIN).any():
            raise DataError(
                f"{users:,} users of {self.table.name} leave none to train; lower validation_share={share:g}"
            )
        if share > 0 and not (role == _VALIDATION).any():
            raise DataError(
                f"validation_share={share:g} of {users:,} users of {self.table.name} gives no validation user: each is "
                "drawn on its own; raise it, or set it to 0"
            )

    def _users(self) -> tuple[NDArray[np.int64], list[str]]:
        """Return each row's user, [rows], and the users' names in rising order."""
        pa, pc, name = arrow(), arrow("pyarrow.compute"), self.settings.user
        chunks = []
        for batch in self._read([name], "users"):
            values = batch.column(0)
            if pa.types.is_floating(values.type):
                raise DataError(f"column {name!r} of {self.table.name} has decimals, which name nobody; make ids text")
            if missing_in(values, empty=True).any():
                raise refuse_missing(self.table, name, self.types, empty=True)
            chunks.append(as_text(values))
        if not chunks:
            raise DataError(f"{self.table.name} has no rows")
        whole = pa.chunked_array(chunks).combine_chunks().dictionary_encode()
        whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
        rising = pc.sort_indices(whole.dictionary).to_numpy()
        rank = np.empty(len(rising), dtype=np.int64)
        rank[rising] = np.arange(len(rising))
        return rank[whole.indices.to_numpy()], whole.dictionary.take(pa.array(rising)).to_pylist()

    def _times(self, rows: int) -> NDArray[Any] | None:
        """Return the time of each row as numbers; None where rows have no order."""
        name = self.settings.time
        if name is None:
            return None
        pa, parts = arrow(), []
        for batch in self._read([name], "times"):
            values = batch.column(0)
            if missing_in(values).any():
                raise refuse_missing(self.table, name, {})
            kind = values.type
            if pa.types.is_date(kind):
                values, kind = values.cast(pa.timestamp("ms")), pa.timestamp("ms")
            if pa.types.is_timestamp(kind):
                parts.append(values.cast(pa.timestamp("ns", kind.tz)).cast(pa.int64()).to_numpy())
            elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
                parts.append(values.cast(pa.float64(), safe=False).to_numpy())
            else:
                raise DataError(
                    f"column {name!r} of {self.table.name} is {kind}, which has no order in time; give numbers or ISO "
                    "dates, like 2026-11-19"
                )
        return np.concatenate(parts)

    def federation(self, name: str, rows: Rows) -> Federation:
        """Read the features, and write each row where it goes."""
        inputs = [self._room(count) for count in rows.counts]
        targets = [
            torch.empty((count, *self.target.shape), dtype=torch.int64 if self.target.count else torch.float32)
            for count in rows.counts
        ]
        wanted = [*(column.name for column in self.columns), *(column.name for column in self.target.columns)]
        before = 0
        try:
            for batch in self._read([*dict.fromkeys(wanted)], "features"):
                here = slice(before, before + batch.num_rows)
                part, place = rows.part[here], rows.place[here]
                blocks: dict[str, NDArray[Any]] = {
                    group: np.concatenate(
                        [Reader(c, self.table.name).array(batch.column(c.name), before) for c in columns], axis=1
                    )
                    for group, columns in self.inputs.items()
                }
                labels = self.target.array(batch, before)
                for each, (x, y) in enumerate(zip(inputs, targets)):
                    mine = part == each
                    for group, block in blocks.items():
                        x[group].numpy()[place[mine]] = block[mine]
                    y.numpy()[place[mine]] = labels[mine]
                before += batch.num_rows
        except MissingValue as missing:
            raise refuse_missing(self.table, missing.column, self.types) from None
        if before != len(rows.part):
            raise DataError(f"{self.table.name} changed while it was read: {len(rows.part):,} rows, then {before:,}")
        x_train, x_validation, x_test = map(_one_or_several, inputs)
        starts = torch.cumsum(rows.train_sizes, 0) - rows.train_sizes
        has_validation = rows.counts[_VALIDATION] > 0
        return Federation(
            name=name,
            train=Packed(x_train, targets[_TRAIN], starts, rows.train_sizes, self.target.count),
            validation=Samples(x_validation, targets[_VALIDATION]) if has_validation else None,
            validation_clients=len(rows.validation_sizes),
            test=Samples(x_test, targets[_TEST]),
            note=self.note,
            validation_sizes=rows.validation_sizes if has_validation else None,
            by_id=True,
            members=members_of(rows.names),
            test_owners=rows.test_owners if self.settings.split == "rows" else None,
        )

    @property
    def note(self) -> str:
        """Say what was held out, and which numbers go in as they are."""
        share = f"{self.settings.test_share:.0%}"
        which = "the last" if self.settings.time is not None else "a random"
        held = f"{which} {share} of each user's rows held out for test: ε does not cover figures measured on them"
        if self.settings.split == "users":
            held = f"{share} of the users held out for test, by a hash of their ids"
        plain = [column.name for column in self.columns if column.plain]
        named = ", ".join(plain[:3]) + (f" and {len(plain) - 3} more" if len(plain) > 3 else "")
        return f"{held}; not scaled, having no range in the schema: {named}" if plain else held

    def _room(self, count: int) -> dict[str, Tensor]:
        kinds = {name: torch.float32 if name == "numbers" else torch.int32 for name in self.inputs}
        return {
            name: torch.empty((count, width_of(columns)), dtype=kinds[name]) for name, columns in self.inputs.items()
        }

    def _read(self, columns: Sequence[str], what: str) -> Iterator[Any]:
        """Yield batches, and tell those who show progress how far it is."""
        done = 0
        for batch in self.table.batches(columns, {name: self.types[name] for name in columns if name in self.types}):
            yield batch
            done += batch.num_rows
            if max(done, self.table.rows or 0) > _MOST_ROWS:
                raise DataError(f"{self.table.name} has more than {_MOST_ROWS:,} rows, which is the limit; give a part")
            for show in LOADING:
                show(f"{what} of {Path(self.table.name).name}", done, self.table.rows)


def _grouped(
    codes: NDArray[np.int64], users: int, times: NDArray[Any] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return rows in the order of users and times (ties as in the file), each user's first place, and its size."""
    order = np.argsort(codes, kind="stable") if times is None else np.lexsort((times, codes))
    sizes = np.bincount(codes, minlength=users)
    return order, np.cumsum(sizes) - sizes, sizes


def _lots(keys: NDArray[np.int64], codes: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a public pseudo-random number for each row, from its user's name and its place among the user's rows."""
    with np.errstate(over="ignore"):  # splitmix64
        z = keys.view(np.uint64)[codes] + (rank.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def _one_or_several(inputs: dict[str, Tensor]) -> Inputs:
    return next(iter(inputs.values())) if len(inputs) == 1 else inputs


def described(part: TableData, table: Table, data: Federation) -> dict[str, Any]:
    """Return what a table becomes, in figures. They come from clients' rows: local only."""
    reading = Reading.of(part, table)
    assert isinstance(data.train, Packed)
    sizes = data.train.sizes.double()
    return {
        "rows": len(data.train.y) + len(data.test),
        "users": data.train.clients,
        "rows_of_a_user": {
            "min": int(sizes.min()), "median": float(np.median(sizes.numpy())),
            "mean": float(sizes.mean()), "max": int(sizes.max()),
        },
        "target": {"columns": ", ".join(part.targets), "classes": reading.target.count},
        "inputs": {name: [width_of(columns)] for name, columns in reading.inputs.items()},
        "columns": {column.name: column.words_of_kind for column in reading.columns},
    }  # fmt: skip


def federation_from_table(
    table: Any,
    user: str,
    target: str | Sequence[str],
    *,
    features: Sequence[str] | None = None,
    text_columns: Sequence[str] = (),
    time: str | None = None,
    classes: int | None = None,
    schema: Any = None,
    schema_from: Any = None,
    split: Split = "rows",
    test_share: float = 0.2,
    validation_share: float = 0.0,
    clients: int | None = None,
    seed: int = 0,
    name: str = "table",
    population: str | None = None,
    public: bool = False,
) -> Federation:
    """Make a federation of a table: a file (CSV, TSV, Parquet, Arrow, Feather), or a frame of pandas, polars, pyarrow
    or Hugging Face datasets.

    `user` names the column that says whose row it is (any ids), `target` what to predict: a number, with `classes` a
    whole number 0..classes-1, or what the schema says. `features` are all other columns, unless you name them.

    `schema` says what columns become: a file, or {"age": {"range": [0, 100]}, "city": {"categories": [...]}}.
    `schema_from`, a public table, gives what the schema leaves out. Neither is ever taken from `table`
    (docs/guides/own-table.md): without a schema numbers stay as they are, and text is refused.

    `test_share` of each user's rows are held out, the last ones where `time` names a column; with split="users" so many
    users. `validation_share`, `seed`, `population` and `public` are those of `federation_from_arrays`.
    """
    wanted = target if isinstance(target, str) else tuple(target)
    chosen = None if features is None else tuple(features)
    settings = TableData(
        user=user, target=wanted, features=chosen, text_columns=tuple(text_columns), time=time, classes=classes,
        schema=schema, split=split, test_share=test_share,
    )  # fmt: skip
    opened = open_table(table)
    settings = settings.with_public(schema_from)
    if isinstance(table, str | Path) and name == "table":
        name = Path(table).name.partition(".")[0]
    data = settings.divided(opened, name, clients, validation_share, seed)
    return replace(data, population=population, public=public)
