"""The reference of every setting and every part, made from the dataclasses: their fields, defaults and comments."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any, cast

from fedblur.core.config import Config, LocalTraining
from fedblur.core.registry import KINDS, Kind, parts


def reference() -> str:
    """The keys of a configuration, then the parts that some of them name."""
    lines = ["## Keys\n", table(Config), "## `local`\n", table(LocalTraining)]
    for kind in KINDS:
        lines += [f"## `{kind}`\n", *_parts(cast(Kind, kind))]
    return "\n".join(lines)


def _parts(kind: Kind) -> Iterator[str]:
    for name, part in sorted(parts(kind).items()):
        yield f"### `{name}`\n\n{_first_paragraph(part)}\n"
        if dataclasses.fields(cast(Any, part)):
            yield table(part)


def _first_paragraph(part: type) -> str:
    return " ".join((inspect.getdoc(part) or "").split("\n\n")[0].split())


def table(schema: type) -> str:
    """Return the fields that one may give, each with its default and its comment in the source."""
    fields = [field for field in dataclasses.fields(cast(Any, schema)) if field.init]
    rows = [f"| `{f.name}` | {_default(f)} | {_comment(schema, f.name)} |" for f in fields]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows, ""])


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "those below"
    if field.default is dataclasses.MISSING:
        return "required"
    return "none" if field.default in (None, (), "") else f"`{field.default}`"


def _comment(schema: type, name: str) -> str:
    """Return what stands behind the field in the source; a field may be inherited."""
    for base in schema.__mro__[:-1]:
        found = re.search(rf"^    {name}: [^\n]*?(?:  # (?P<words>[^\n]*))?$", inspect.getsource(base), re.MULTILINE)
        if found:
            words = re.sub(r"^noqa: [^;]*; ", "", found["words"] or "")  # what a linter is told
            return words.replace("|", "\\|").replace("<", "&lt;")
    return ""
