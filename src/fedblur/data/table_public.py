"""A schema from a public table: categories and ranges for the columns that the user's schema leaves out.

Never give it the private table: its values would become constants that everyone's features are computed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedblur.core.errors import DataError
from fedblur.data.table_columns import as_text, plain
from fedblur.data.table_schema import Column
from fedblur.data.table_source import Table, arrow

_MOST = 1000  # categories of a column of text; more are free text


def public_schema(
    table: Table, features: Sequence[str], given: tuple[Column, ...], targets: Sequence[str], text: Sequence[str]
) -> tuple[Column, ...]:
    """Return the given columns, and one for each other feature and target that the public table has."""
    known = {column.name for column in given} | {*text}
    names = [name for name in dict.fromkeys([*features, *targets]) if name in table.columns and name not in known]
    found = [_column(table, name, is_target=name in targets) for name in names]
    return (*given, *(column for column in found if column is not None))


def _column(table: Table, name: str, is_target: bool) -> Column | None:
    pa, pc = arrow(), arrow("pyarrow.compute")
    values: set[str] = set()
    low = high = None
    for batch in table.batches([name]):
        part: Any = plain(batch.column(0)).drop_null()
        if pa.types.is_boolean(part.type) or not len(part):
            continue
        if pa.types.is_integer(part.type) or pa.types.is_floating(part.type) or pa.types.is_decimal(part.type):
            ends = pc.min_max(part.cast(pa.float64())).as_py()
            low = ends["min"] if low is None else min(low, ends["min"])
            high = ends["max"] if high is None else max(high, ends["max"])
            continue
        values |= {*as_text(part).unique().to_pylist()}
        if len(values) > _MOST:
            raise DataError(
                f"column {name!r} of the public {table.name} has more than {_MOST:,} different values: say in the "
                f"schema what it becomes, for instance {name} = {{ words = 1024 }} or {{ buckets = 64 }}"
            )
    if values:
        return Column(name, categories=tuple(sorted(values)), other=not is_target)
    return Column(name, range=(low, high)) if low is not None and high is not None and low < high else None
