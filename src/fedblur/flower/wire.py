"""The messages between server and nodes, as one table. Both sides build and read messages by this table alone.

A reply holds what its kind allows and no more: no loss, no norm, no count of samples, no text of an error. Arrays are
raw bytes of one exact length, so that reading a hostile one is a comparison of lengths. A question carries a nonce that
its reply must repeat, so that no node can answer for another or for another round. No torch in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

HEAD, ARRAYS = "fedblur", "arrays"
_KEY = 4096  # bytes of a public key, a share or a sealed share, at most
_FRAME = 2**16  # bytes of a reply beside its values and arrays: names, Flower's own records
_STYPE = "fedblur.raw"


class Refused(Exception):
    """A reply or a question that is not as it must be. The reason is for the log of the side that refuses."""


@dataclass(frozen=True)
class Kind:
    """The content that one kind of message may have, beside `round` and `nonce`."""

    values: Mapping[str, type | tuple[type]]  # a tuple: a list of that type
    arrays: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # arrays that may be absent


_JOB = {"clip_norm": float, "bit_weight": float, "noise_multiplier": float, "client": int, "constants": str}
QUESTIONS = {
    "update": Kind(_JOB, ("start",), ("support", "personal")),
    "keys": Kind({}),
    "shares": Kind({"number": int, "members": (int,), "mask_publics": (bytes,), "seal_publics": (bytes,)}),
    "masked": Kind({**_JOB, "dealers": (int,), "sealed": (bytes,)}, ("start",), ("support", "personal")),
    "unmask": Kind({"alive": (int,), "dropped": (int,)}),
}
REPLIES = {
    "update": Kind({}, ("update",)),
    "keys": Kind({"mask": bytes, "seal": bytes}),
    "shares": Kind({"sealed": (bytes,), "commitment": bytes}),
    "masked": Kind({}, ("masked",)),
    "unmask": Kind({"seeds": (bytes,), "keys": (bytes,)}),
}


def build(
    kind: Kind, round_: int, nonce: bytes, values: Mapping[str, Any], arrays: Mapping[str, bytes] | None = None
) -> RecordDict:
    """Build a message's content. What its kind does not allow cannot be built."""
    arrays = arrays or {}
    if set(values) != set(kind.values) or not set(kind.arrays) <= set(arrays) <= {*kind.arrays, *kind.optional}:
        raise Refused(f"a message of {sorted(values)} and {sorted(arrays)} is not on the list")
    head = ConfigRecord({"round": round_, "nonce": nonce, **values})
    raw = {name: Array(dtype="bytes", shape=(len(data),), stype=_STYPE, data=data) for name, data in arrays.items()}
    return RecordDict({HEAD: head, ARRAYS: ArrayRecord(raw)})


def refusal(round_: int, nonce: bytes) -> RecordDict:
    """Return a reply that says no, and not why: the reason could reveal something about data."""
    return RecordDict({HEAD: ConfigRecord({"round": round_, "nonce": nonce, "refused": True})})


def read(content: RecordDict, kind: Kind) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return a message's values and arrays, if they are what its kind allows."""
    records = {*content.config_records, *content.array_records}
    if len(content.metric_records) or HEAD not in content.config_records or not records <= {HEAD, ARRAYS}:
        raise Refused("its records are not those of a message")
    head = dict(content.config_records[HEAD])
    if head.get("refused") is True:
        raise Refused("the node said no")
    values: dict[str, Any] = {}
    forms: dict[str, type | tuple[type]] = {"round": int, "nonce": bytes, **kind.values}
    for name, form in forms.items():
        value: Any = head.pop(name, None)
        items, one = (value, form[0]) if isinstance(form, tuple) else ([value], form)
        if not isinstance(items, list) or any(type(item) is not one for item in items):
            raise Refused(f"{name} is missing or of another type")
        if one is bytes and any(len(item) > _KEY for item in items):
            raise Refused(f"{name} is too long")
        values[name] = list(items) if isinstance(form, tuple) else value
    if head:
        raise Refused("it holds values that are not on the list")
    arrays = dict(content.array_records.get(ARRAYS) or {})
    if not set(kind.arrays) <= set(arrays) <= {*kind.arrays, *kind.optional}:
        raise Refused("its arrays are not on the list")
    if any(type(array.data) is not bytes or array.stype != _STYPE for array in arrays.values()):
        raise Refused("an array is not of raw bytes")
    return values, {name: array.data for name, array in arrays.items()}


def read_reply(message: Message, kind: str, round_: int, nonce: bytes, length: int | None) -> dict[str, Any]:
    """Return a node's reply to a question, or Refused. `length`: bytes of its array, if its kind has one."""
    if message.has_error() or not message.has_content():
        raise Refused("it is an error")
    values, arrays = read(message.content, REPLIES[kind])
    if values.pop("round") != round_:
        raise Refused("it is of another round")
    if values.pop("nonce") != nonce:
        raise Refused("it does not answer this question")
    for data in arrays.values():
        if len(data) != length:
            raise Refused(f"its array has {len(data)} bytes in place of {length}")
        values["array"] = data
    return values


def longest(kind: str, members: int, length: int) -> int:
    """Return the most bytes that a reply can have: lists have one item per member, arrays `length` bytes."""
    items = sum(members if isinstance(form, tuple) else 1 for form in REPLIES[kind].values.values())
    return _FRAME + items * _KEY + len(REPLIES[kind].arrays) * length


def size(content: RecordDict) -> int:
    """Count the bytes that a message carries, without the transport's own."""
    heads = (value for record in content.config_records.values() for value in record.values())
    arrays = (array for record in content.array_records.values() for array in record.values())
    return sum(map(_bytes, heads)) + sum(len(array.data) for array in arrays)


def _bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_bytes, value))
    return len(value) if isinstance(value, bytes | str) else 8
