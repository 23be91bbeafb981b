"""Schema of a table: what each column becomes. In: what the user gives, or a public table. Out: columns, never rows.

    range = [0, 100]            a number, clamped to the range and scaled to 0..1 (`scale = false`: clamped alone)
    categories = ["a", "b"]     one feature for each (`codes = true`: the category's number, for an embedding)
      other = true              any other value is one more category; false: it is refused
    buckets = 32                a category of unknown values: a public hash puts each into one of so many
    words = 1024                text: how often words occur, hashed into so many features, of length 1
    bytes = 64                  text: its first bytes (UTF-8) as tokens 1..256; 0 pads
    length = 16                 a list of so many numbers
    missing = 0                 what stands for a missing value; without it, one is refused

Privacy: nothing here looks at private rows. The shape of a sample follows from names and settings of columns alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblur.core.config import read_toml
from fedblur.core.errors import ConfigError, nearest
from fedblur.core.files import each_key_once, read_bytes
from fedblur.core.registry import check_types, from_table

TOKENS = 257  # of text as bytes: 0 pads
_MOST_CATEGORIES = 10**6
_KINDS = ("categories", "buckets", "words", "bytes", "length", "range")


@dataclass(frozen=True)
class Column:
    """A column's settings."""

    name: str
    categories: tuple[str, ...] | None = None
    other: bool = False
    codes: bool = False
    buckets: int | None = None
    words: int | None = None
    bytes: int | None = None
    length: int | None = None
    range: tuple[float, float] | None = None
    scale: bool = True
    missing: str | float | None = None

    def __post_init__(self) -> None:
        where = f"schema column {self.name!r}"
        given: Any = self.categories
        if given is not None:
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise ConfigError(f'{where}: categories={given!r} must be a list, like ["low", "high"]')
            object.__setattr__(self, "categories", tuple(map(_as_text, given)))
        check_types(self, f"{where}: ")
        kinds = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(kinds) > 1:
            raise ConfigError(f"{where} is both {kinds[0]} and {kinds[1]}; give one of them")
        for name, most in (("buckets", 10**6), ("words", 2**20), ("bytes", 2**16), ("length", 2**20)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"{where}: {name}={value} must be from 1 to {most:,}")
        if self.categories is not None:
            self._check_categories(where, self.categories)
        if (self.other and self.categories is None) or (self.codes and not (self.categories or self.buckets)):
            key = "other" if self.other and self.categories is None else "codes"
            raise ConfigError(f"{where}: {key} = true is about categories; give categories = [...]")
        if self.range is not None and not -math.inf < self.range[0] < self.range[1] < math.inf:
            raise ConfigError(f"{where}: range={[*self.range]} must be [lowest, highest], finite")

    @staticmethod
    def _check_categories(where: str, categories: tuple[str, ...]) -> None:
        if not 1 <= len(categories) <= _MOST_CATEGORIES:
            raise ConfigError(f"{where}: {len(categories)} categories must be from 1 to {_MOST_CATEGORIES:,}")
        counts = Counter(categories)
        twice = next((value for value, count in counts.items() if count > 1), None)
        if twice is not None:
            raise ConfigError(f"{where}: category {twice!r} is named twice")

    @property
    def text(self) -> bool:
        """Whether its values are read as text."""
        return any(value is not None for value in (self.categories, self.buckets, self.words, self.bytes))

    @property
    def plain(self) -> bool:
        """Whether its values are numbers that nothing scales."""
        return not self.text and self.length is None and self.range is None

    @property
    def values(self) -> int:
        """The number of different codes of a category; 0 for anything else."""
        if self.categories is not None:
            return len(self.categories) + self.other
        return self.buckets or 0

    @property
    def width(self) -> int:
        """The number of features that are numbers; 0 for codes and tokens, which are inputs of their own."""
        if self.bytes is not None or self.codes:
            return 0
        return self.values or self.words or self.length or 1

    @property
    def words_of_kind(self) -> str:
        """Say what the column becomes."""
        if self.values:
            kind = "categories" if self.categories is not None else "hashed categories"
            return f"{self.values} {kind}, " + ("as codes" if self.codes else "one feature each")
        if self.words is not None:
            return f"text, words hashed into {self.words} features"
        if self.bytes is not None:
            return f"text, its first {self.bytes} bytes as tokens"
        if self.length is not None:
            return f"a list of {self.length} numbers"
        if self.range is None:
            return "a number, as it is"
        low, high = self.range
        return f"a number, clamped to {low:g}..{high:g}" + (" and scaled to 0..1" if self.scale else "")


def _as_text(value: Any) -> str:
    """Write a category as Arrow writes a value: true, 3 (also for 3.0), 2.5, text as it is."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise ConfigError(f"category {value!r} must be text or a number")
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else str(value)


def read_schema(given: Any) -> tuple[Column, ...]:
    """Return columns from a file's path (TOML or JSON), a table by column's name, or a list of columns."""
    if given is None:
        return ()
    if isinstance(given, str | Path):
        given = _read_file(Path(given))
    if isinstance(given, Mapping):
        if isinstance(given.get("columns"), Mapping):
            given = given["columns"]
        given = [{"name": name, **_settings(name, settings)} for name, settings in given.items()]
    if not isinstance(given, Sequence):
        raise ConfigError(f"schema={given!r} must be a file, or a table like {{age = {{range = [0, 100]}}}}")
    columns = tuple(
        each if isinstance(each, Column) else from_table(Column, _settings("", each), "schema.") for each in given
    )
    names = [column.name for column in columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"the schema names column {twice!r} twice")
    return columns


def _settings(name: str, settings: Any) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"schema column {name!r}: {settings!r} must be a table, like {{range = [0, 100]}}")
    found = dict(settings)
    if isinstance(found.get("categories"), list | tuple):
        found["categories"] = [*map(_as_text, found["categories"])]
    return found


def _read_file(path: Path) -> Mapping[str, Any]:
    if path.suffix != ".json":
        return read_toml(path)
    try:
        table = json.loads(read_bytes(path, way_out="give a schema"), object_pairs_hook=each_key_once)
    except OSError as error:
        raise ConfigError(f"schema {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"schema {path} is not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f'schema {path} holds a {type(table).__name__}; write {{"age": {{"range": [0, 100]}}}}')
    return table


def choose(names: Sequence[str], wanted: Sequence[str], what: str) -> None:
    """Refuse a name that is not a column of the table."""
    for name in wanted:
        if name not in names:
            raise ConfigError(f"{what} {name!r} is not a column: {nearest(name, names)}")


def hashed(values: Iterable[str | None], buckets: int) -> list[int]:
    """Hash each value into a bucket by a fixed, public function: the same everywhere and for everyone."""
    digests = (
        hashlib.blake2b((value or "").encode(), digest_size=8, person=b"fedblur table").digest() for value in values
    )
    return [int.from_bytes(digest, "little") % buckets for digest in digests]
