"""Columns of a table as arrays. In: Arrow batches and the columns' settings. Out: NumPy blocks of features and targets.

Each value becomes features by itself: no constant is computed from other rows. A value that does not fit is refused by
column and row (the first row is 1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedblur.core.errors import DataError
from fedblur.data.table_schema import TOKENS, Column, hashed
from fedblur.data.table_source import Table, arrow

Block = NDArray[Any]
_NO_WORD = r"[^\p{L}\p{N}_]+"


class MissingValue(Exception):
    """A column that has a missing value; how many there are, a second look says."""

    def __init__(self, column: str) -> None:
        super().__init__(column)
        self.column = column


def refuse_missing(table: Table, column: str, types: dict[str, Any], empty: bool = False) -> DataError:
    """Return the error that names a column with missing values: how many, and where the first is."""
    count, first, rows = 0, 0, 0
    for batch in table.batches([column], types):
        gone = missing_in(batch.column(0), empty)
        if gone.any() and not count:
            first = rows + int(gone.argmax()) + 1
        count += int(gone.sum())
        rows += len(gone)
    stand_in = "" if empty else ", or give what stands for them in the schema (missing = 0)"
    return DataError(
        f"column {column!r} of {table.name} has {count:,} missing values of {rows:,}, the first in row {first:,}: drop "
        f"those rows{stand_in}"
    )


def missing_in(values: Any, empty: bool = False) -> NDArray[np.bool_]:
    """Return which values are missing: null, or not a number; with `empty` also text of length 0."""
    pc = arrow("pyarrow.compute")
    gone = values.is_null(nan_is_null=True)
    if empty and _is_text(values.type):
        gone = pc.or_(gone, pc.equal(pc.fill_null(pc.binary_length(values), 0), 0))
    return np.asarray(gone.to_numpy(zero_copy_only=False), dtype=bool)


def plain(values: Any) -> Any:
    """Return values without a dictionary around them (a pandas categorical)."""
    return values.dictionary_decode() if arrow().types.is_dictionary(values.type) else values


def as_text(values: Any) -> Any:
    """Return values as Arrow text."""
    pa = arrow()
    values = plain(values)
    return values if pa.types.is_large_string(values.type) else values.cast(pa.large_string())


def _is_text(kind: Any) -> bool:
    types = arrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_number(kind: Any) -> bool:
    types = arrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind))


@dataclass(frozen=True)
class Reader:
    """One column, made into an array batch by batch."""

    column: Column
    table: str  # its name, for errors

    def array(self, values: Any, before: int) -> Block:
        """Return [rows, width]: float32 numbers, or int32 codes and tokens. `before`: rows of earlier batches."""
        column, values = self.column, plain(values)
        if column.length is not None:
            return self._lists(values, before)
        if column.missing is not None:
            values = self._filled(values)
        if missing_in(values).any():
            raise MissingValue(column.name)
        if column.bytes is not None:
            return first_bytes(as_text(values), column.bytes)
        if column.words is not None:
            return bag_of_words(as_text(values), column.words)
        if not column.values:
            return self._numbers(values, before).astype(np.float32)[:, None]
        codes = self.codes(values, before)
        if column.codes:
            return codes.astype(np.int32)[:, None]
        hot = np.zeros((len(codes), column.values), dtype=np.float32)
        hot[np.arange(len(codes)), codes] = 1
        return hot

    def codes(self, values: Any, before: int) -> Block:
        """Return the number of each value's category, [rows] int64."""
        column, pa, pc = self.column, arrow(), arrow("pyarrow.compute")
        text = as_text(values)
        if column.buckets is not None:
            encoded = text.dictionary_encode()
            places = np.array(hashed(encoded.dictionary.to_pylist(), column.buckets), dtype=np.int64)
            return np.asarray(places[encoded.indices.to_numpy()])
        assert column.categories is not None
        found = pc.index_in(text, value_set=pa.array(column.categories, pa.large_string()))
        if found.null_count and not column.other:
            row = int(np.asarray(found.is_null().to_numpy(zero_copy_only=False)).argmax())
            raise DataError(
                f"column {column.name!r} of {self.table} has {text[row].as_py()!r} in row {before + row + 1:,}, which "
                f"is not among its {len(column.categories)} categories; add it to the schema, or set other = true"
            )
        return np.asarray(pc.fill_null(found, len(column.categories)).to_numpy(), dtype=np.int64)

    def _filled(self, values: Any) -> Any:
        pa, pc, column = arrow(), arrow("pyarrow.compute"), self.column
        if column.text:
            return pc.fill_null(as_text(values), str(column.missing))
        try:
            stand_in = pa.scalar(float(str(column.missing)))
        except ValueError:
            raise DataError(f"column {column.name!r}: missing = {column.missing!r} must be a number") from None
        values = values.cast(pa.float64())
        return pc.if_else(values.is_null(nan_is_null=True), stand_in, values)

    def _numbers(self, values: Any, before: int) -> Block:
        pa, name = arrow(), self.column.name
        if not _is_number(values.type):
            raise DataError(self._no_number(values.type))
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.uint8())
        numbers = np.asarray(values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
        if self.column.range is not None:
            low, high = self.column.range
            clamped = np.clip(numbers, low, high)  # infinite ones too
            return np.asarray((clamped - low) / (high - low) if self.column.scale else clamped)
        huge = ~(np.abs(numbers) <= np.finfo(np.float32).max)
        if huge.any():
            row = int(huge.argmax())
            raise DataError(
                f"column {name!r} of {self.table} is {numbers[row]:g} in row {before + row + 1:,}, which 32 bits do "
                "not hold; give it a range in the schema: values outside are clamped"
            )
        return np.asarray(numbers)

    def _no_number(self, kind: Any) -> str:
        name, where = self.column.name, f"column {self.column.name!r} of {self.table}"
        if _is_text(kind):
            return (
                f"{where} is text: say in a schema what it becomes, for instance {name} = {{ categories = [...] }}, "
                f"{{ buckets = 32 }} or {{ words = 1024 }}; or leave it out (features, --feature-columns)"
            )
        return f"{where} is {kind}, which is no number: convert it, or leave it out (features, --feature-columns)"

    def _lists(self, values: Any, before: int) -> Block:
        types, name, length = arrow().types, self.column.name, self.column.length
        assert length is not None
        kind = values.type
        if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
            raise DataError(
                f"column {name!r} of {self.table} is {kind}, and the schema says a list of {length} numbers"
            )
        if values.null_count:
            raise MissingValue(name)
        lengths = np.asarray(arrow("pyarrow.compute").list_value_length(values).to_numpy())
        if (lengths != length).any():
            row = int((lengths != length).argmax())
            raise DataError(
                f"column {name!r} of {self.table} has {lengths[row]} numbers in row {before + row + 1:,}, must have "
                f"{length}"
            )
        inner = values.flatten()
        if not _is_number(inner.type) or missing_in(inner).any():
            raise DataError(f"column {name!r} of {self.table} has lists with something that is no number")
        flat = np.asarray(inner.cast(arrow().float32(), safe=False).to_numpy(zero_copy_only=False))
        if not np.isfinite(flat).all():
            raise DataError(f"column {name!r} of {self.table} has lists with infinite numbers")
        return flat.reshape(-1, length)


def first_bytes(text: Any, length: int) -> Block:
    """Return the first bytes of each value, plus 1; 0 after its end: [rows, length] int32."""
    _, offsets, data = text.buffers()
    starts = np.frombuffer(offsets, dtype=np.int64)[text.offset : text.offset + len(text) + 1]
    letters = np.frombuffer(data, dtype=np.uint8) if data is not None and data.size else np.zeros(1, dtype=np.uint8)
    places = starts[:-1, None] + np.arange(length)
    inside = places < starts[1:, None]
    found = letters[np.minimum(places, len(letters) - 1)].astype(np.int32) + 1
    return np.where(inside, found, 0).astype(np.int32)


def bag_of_words(text: Any, buckets: int) -> Block:
    """Return how often each bucket's words occur, scaled to length 1: [rows, buckets] float32. No word: zeros."""
    pc = arrow("pyarrow.compute")
    lists = pc.split_pattern_regex(pc.utf8_lower(text), pattern=_NO_WORD)
    encoded = lists.flatten().dictionary_encode()
    words = encoded.dictionary.to_pylist()
    places = np.array([-1 if not word else place for word, place in zip(words, hashed(words, buckets))], dtype=np.int64)
    found = places[encoded.indices.to_numpy()] if len(words) else np.zeros(0, dtype=np.int64)
    rows = np.repeat(np.arange(len(text)), np.asarray(pc.list_value_length(lists).to_numpy()))
    counts = np.zeros((len(text), buckets), dtype=np.float32)
    np.add.at(counts, (rows[found >= 0], found[found >= 0]), 1)
    lengths = np.sqrt(np.square(counts).sum(1, keepdims=True))
    return np.asarray(counts / np.maximum(lengths, 1))


@dataclass(frozen=True)
class Target:
    """The targets: one column of classes, numbers or tokens, or several columns of numbers."""

    columns: tuple[Column, ...]
    classes: int | None  # given by the user; None: from the schema, or numbers
    table: str

    def __post_init__(self) -> None:
        for column in self.columns:
            if column.words is not None:
                raise DataError(f"target {column.name!r} cannot be a bag of words; give categories, buckets or bytes")
            if len(self.columns) > 1 and (column.text or column.length):
                raise DataError(f"several targets must be numbers, {column.name!r} is not; give one target")
        if self.classes is not None and not 1 <= self.classes <= 10**6:
            raise DataError(f"classes={self.classes} must be from 1 to 1,000,000")
        known = self.columns[0].values or (TOKENS if self.columns[0].bytes is not None else 0)
        if self.classes is not None and known and known != self.classes:
            raise DataError(
                f"classes={self.classes}, but the schema gives target {self.columns[0].name!r} {known}; give "
                "one of them"
            )

    @property
    def count(self) -> int:
        """Return how many classes there are; 0 for numbers."""
        one = self.columns[0]
        return self.classes or one.values or (TOKENS if one.bytes is not None else 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one sample's target."""
        one = self.columns[0]
        if len(self.columns) > 1:
            return (len(self.columns),)
        inner = one.length or one.bytes
        return () if inner is None else (inner,)

    def array(self, batch: Any, before: int) -> Block:
        """Return [rows, *shape]: int64 for classes and tokens, float32 for numbers, never scaled."""
        parts = [self._one(column, batch.column(column.name), before) for column in self.columns]
        return parts[0] if len(parts) == 1 else np.stack(parts, axis=1)

    def _one(self, column: Column, values: Any, before: int) -> Block:
        reader = Reader(replace(column, scale=False), self.table)
        if column.values:
            values = plain(values)
            if missing_in(values).any():
                raise MissingValue(column.name)
            return reader.codes(values, before)
        found = reader.array(values, before)
        if column.bytes is not None:
            return found.astype(np.int64)
        found = found if column.length is not None else found[:, 0]
        return found if self.classes is None else self._labels(column.name, found, before)

    def _labels(self, name: str, values: Block, before: int) -> Block:
        assert self.classes is not None
        wrong = ~((values >= 0) & (values < self.classes) & (values == np.floor(values)))
        if wrong.any():
            row = int(wrong.reshape(len(wrong), -1).any(1).argmax())
            raise DataError(
                f"target {name!r} of {self.table} is {values[row]} in row {before + row + 1:,}, must be a whole "
                f"number in 0..{self.classes - 1}; or give its categories in a schema"
            )
        return values.astype(np.int64)


def input_names(columns: Sequence[Column]) -> dict[str, list[Column]]:
    """Group features into inputs: `numbers` side by side, `codes` side by side, each text of tokens on its own."""
    groups: dict[str, list[Column]] = {}
    for column in columns:
        if column.bytes is not None:
            group = re.sub(r"\W", "_", column.name)
            if group in groups or group in ("numbers", "codes"):
                raise DataError(f"column {column.name!r} would be a second input {group!r}; rename it")
        else:
            group = "codes" if column.codes else "numbers"
        groups.setdefault(group, []).append(column)
    return groups


def width_of(columns: Sequence[Column]) -> int:
    """Return how wide an input of these columns is."""
    return sum(column.width or column.bytes or 1 for column in columns)
