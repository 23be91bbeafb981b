"""The registry, which finds parts by name. A part is one file with one frozen dataclass: its fields are its settings.

    @register("method", "blur")
    @dataclass(frozen=True)
    class Blur(Method):
        strength: float = 0.4

Third parties add theirs through the entry-point group `fedblur.parts`: each entry names a module to import.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import math
import pkgutil
import re
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from fedblur.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Kind = Literal[
    "dataset", "partition", "model", "method", "mechanism", "sampling", "server", "averaging", "clipping", "mask",
    "voting", "denoise", "task", "metric",
]  # fmt: skip
KINDS: tuple[str, ...] = get_args(Kind)
_ALSO: dict[str, Kind] = {"method": "voting"}  # a protocol of its own is chosen where methods are
_PARTS: dict[str, dict[str, type]] = {kind: {} for kind in KINDS}
_BASES: dict[str, type] = {}  # what the parts of a kind must derive from, where that is asked
# Which modules register the parts of a kind, or which package whose modules do. `fedblur/__init__.py` fills it: the one
# place that knows all rooms.
PART_HOMES: dict[str, str] = {}
T = TypeVar("T", bound=type)
_MOST, _MOST_OF_A_PART = 2**63 - 1, 10**7  # whole numbers: what 64 bits hold, and what a part may count or allocate
_LEAST, _LARGEST = 1e-45, 3.4e38  # other numbers: what 32 bits hold


def register(kind: Kind, name: str) -> Callable[[T], T]:
    """Decorate a frozen dataclass: it becomes available as `name` in configurations."""

    if kind not in _PARTS:
        raise ConfigError(f"{kind!r} is not a kind of part: {nearest(kind, KINDS)}")

    def add(part: T) -> T:
        if not dataclasses.is_dataclass(part):
            raise TypeError(f"{part.__name__}: a part is a frozen dataclass; put @dataclass below @register")
        other = _PARTS[kind].get(name)
        if other is not None and other.__qualname__ != part.__qualname__:
            raise ValueError(f"two parts want to be {kind} {name!r}: {other} and {part}")
        _PARTS[kind][name] = part
        part.part_name = name  # type: ignore[attr-defined]
        return part

    return add


def declare_base(kind: Kind, base: type) -> None:
    """Name the class that parts of a kind derive from, so that a part of a plugin can be checked before it is used."""
    _BASES[kind] = base


def base_of(kind: Kind) -> type | None:
    """Return the class that parts of a kind must derive from, or None where any dataclass will do."""
    _load(kind)
    return _BASES.get(kind)


@functools.cache
def _load(kind: str) -> None:
    """Import the homes of a kind, so that its files register themselves, and then third parties' modules."""
    from importlib.metadata import entry_points

    for name in PART_HOMES[kind].split():
        home = importlib.import_module(name)
        for module in pkgutil.iter_modules(getattr(home, "__path__", [])):
            importlib.import_module(f"{name}.{module.name}")
    for entry in entry_points(group="fedblur.parts"):
        entry.load()


def parts(kind: Kind) -> Mapping[str, type]:
    """Return all parts of a kind, by name."""
    _load(kind)
    return _PARTS[kind]


def build(kind: Kind, value: Any) -> Any:
    """Build a part from `"name"` or `{name = "...", setting = ...}`; an instance passes unchanged."""
    known = {**parts(kind), **(parts(_ALSO[kind]) if kind in _ALSO else {})}
    if isinstance(value, tuple(known.values())):
        return value
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError(f"{kind}={value!r} must be a name or a table with a name, like {kind} = {example(kind)}")
    name = table["name"]
    if name not in known:
        slip = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        own = "" if slip else " For a part of your own, name its file: --plugin FILE or plugins = [...]"
        raise ConfigError(f"{kind} {name!r} is unknown: {nearest(name, known)}{own}")
    return from_table(known[name], {k: v for k, v in table.items() if k != "name"}, f"{kind}.{name}.")


def is_a(kind: Kind, value: Any) -> bool:
    """Return whether a part is of this kind."""
    return isinstance(value, tuple(parts(kind).values()))


def example(kind: Kind) -> str:
    """Return how a part of this kind is written, for error messages."""
    return f'"{next(iter(sorted(parts(kind))))}"'


def describe(part: Any) -> dict[str, Any]:
    """Return a table with the name and every setting, the inverse of `build`."""
    return {"name": part.part_name, **to_table(part)}


def to_table(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields as plain values; parts inside become tables with their name."""
    return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return describe(value) if hasattr(value, "part_name") else to_table(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def from_table(schema: type, table: Mapping[str, Any], prefix: str = "") -> Any:
    """Make a frozen dataclass from plain values. Its fields are the schema; anything else is an error."""
    hints = _hints(schema)
    fields = {f.name: f for f in dataclasses.fields(schema)}
    unknown = next((key for key in table if key not in fields), None)
    if unknown is not None:
        known = nearest(unknown, fields) if fields else f"{prefix.rstrip('.')} has no settings; drop it"
        raise ConfigError(f"unknown key {prefix + unknown!r}: {known}")
    values = {key: _convert(fields[key], hints[key], value, prefix) for key, value in table.items()}
    return schema(**values)


@functools.cache  # a table asks for those of the same few classes thousands of times
def _hints(schema: type) -> dict[str, Any]:
    return typing.get_type_hints(schema)


def check_types(part: Any, prefix: str = "") -> None:
    """Check values that were given in Python: a dataclass does not check them itself."""
    hints = _hints(part.__class__)
    for field in dataclasses.fields(part):
        if "part" not in field.metadata:
            value = _convert(field, hints[field.name], getattr(part, field.name), prefix)
            object.__setattr__(part, field.name, value)


def _convert(field: dataclasses.Field[Any], hint: Any, value: Any, prefix: str) -> Any:
    kind = field.metadata.get("part")
    if kind is not None:
        return convert_part(kind, value, many=field.metadata.get("many", False), key=field.name)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_table(typing.cast(type, hint), value, f"{prefix}{field.name}.")
    kinds = {hint, *typing.get_args(hint)}
    if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:  # Python takes it for 0 or 1
        raise ConfigError(f"{prefix}{field.name}={value!r}: input should be a number, not true or false")
    _check_size(value, f"{prefix}{field.name}", part=prefix not in ("", "local."))
    from pydantic import ValidationError  # slow to import, and `fedblur --help` needs none of it

    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ConfigError(f"{prefix}{field.name}={value!r}: {message[0].lower()}{message[1:]}") from None


def _check_size(value: Any, name: str, part: bool) -> None:
    """Refuse numbers that would overflow, or ask for more memory or time than there is, before they are used."""
    if isinstance(value, int) and abs(value) > (_MOST_OF_A_PART if part and "seed" not in name else _MOST):
        raise ConfigError(f"{name}={value} is too large; give a smaller number")
    if isinstance(value, float) and math.isfinite(value) and value and not _LEAST <= abs(value) <= _LARGEST:
        what = "is too large; give a smaller number" if abs(value) > 1 else "is too small; give a larger number, or 0"
        raise ConfigError(f"{name}={value} {what}")


def convert_part(kind: Kind, value: Any, many: bool = False, key: str = "") -> Any:
    """Convert a field's value to a part, or to several if the field holds `many`. `key`: the field, for errors."""
    key = key or kind
    if value is None:
        return None
    if not many:
        return build(kind, value)
    if isinstance(value, str):  # "blur+lus", as typed on the command line; DP-FedAvg is the empty list
        if re.search(r"\w[\s,;/&]+\w", value):
            raise ConfigError(f'{key}={value!r}: join several with a plus, like {key} = "blur+lus"')
        value = [word.strip() for word in value.split("+") if word.strip() != "dp-fedavg"]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{key}={value!r} must be a name or a list of parts, like {key} = {example(kind)}")
    built = tuple(build(kind, item) for item in value)
    names = [item.part_name for item in built]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{key}={value!r} names {twice!r} twice; name it once")
    return built


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    """Check one value against its type hint; dataclasses and other types that we cannot check pass unchanged."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(
        hint, config=None if dataclasses.is_dataclass(hint) else ConfigDict(arbitrary_types_allowed=True)
    )


def part(kind: Kind, default: Any = None, many: bool = False) -> Any:
    """Declare a configuration field that holds a part (or several) of a kind."""
    return dataclasses.field(default=default, metadata={"part": kind, "many": many})
