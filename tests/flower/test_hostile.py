"""Hostile replies: none reaches the sum, none stops the server, none is lost on the way to the log."""

from __future__ import annotations

import logging
import math
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.logger import FLOWER_LOGGER
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedblur.flower import wire
from fedblur.flower.exchange import Exchange
from fedblur.flower.wire import REPLIES, Refused, read_reply
from fedblur.privacy.clipping import Message as Bounding
from tests.flower.world import SECURE, LoopGrid, Lost, deployment, federated, kind_of, weights

WIDTH = 6
ROUND, NONCE = 4, b"n" * 16


def raw(data: bytes, stype: str = "fedblur.raw") -> ArrayRecord:
    return ArrayRecord({"update": Array(dtype="bytes", shape=(len(data),), stype=stype, data=data)})


def floats(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


GOOD = floats(0.1, -0.2, 0.0, 0.3, 0.0, 0.1)
scalars = st.one_of(
    st.integers(-(2**40), 2**40), st.floats(), st.text(max_size=5), st.binary(max_size=40), st.booleans()
)
heads = st.dictionaries(
    st.sampled_from(["round", "nonce", "loss", "refused", "mask", "seeds", "x"]),
    st.one_of(scalars, st.lists(st.integers(0, 9), max_size=4), st.lists(st.binary(max_size=9), max_size=4)),
    max_size=5,
)
payloads = st.one_of(
    st.binary(max_size=80),
    st.just(pickle.dumps({"a": 1})),
    st.lists(st.floats(width=32), min_size=WIDTH, max_size=WIDTH).map(lambda v: floats(*v)),
    st.integers(WIDTH + 1, 5000).map(lambda n: bytes(4 * n)),
    st.just(bytes(2**20)),
)


@st.composite
def contents(draw: st.DrawFn) -> RecordDict:
    """A reply that is wrong in at least one way, and right in others."""
    right: dict[str, Any] = {"round": ROUND, "nonce": NONCE}
    kind = draw(st.sampled_from(["head", "payload", "records", "round", "nonce", "stype", "wild"]))
    head, array = dict(right), raw(GOOD)
    if kind == "head":
        head |= draw(heads.filter(lambda h: {**right, **h} != right))
    elif kind == "payload":
        array = raw(draw(payloads.filter(lambda data: not valid(data))))
    elif kind == "round":
        head["round"] = draw(st.integers(-5, 50).filter(lambda r: r != ROUND))
    elif kind == "nonce":
        head["nonce"] = draw(st.binary(max_size=32).filter(lambda n: n != NONCE))
    elif kind == "stype":
        array = raw(GOOD, draw(st.sampled_from(["numpy.ndarray", "pickle", "", "fedblur"])))
    content = RecordDict({wire.HEAD: ConfigRecord(head), wire.ARRAYS: array})
    if kind == "records":
        content[draw(st.sampled_from(["more", "loss"]))] = MetricRecord({"loss": draw(st.floats())})
        if draw(st.booleans()):
            del content[draw(st.sampled_from([wire.HEAD, wire.ARRAYS]))]
    if kind == "wild":
        return RecordDict({draw(st.text(max_size=8)): ConfigRecord(draw(heads))})
    return content


def valid(data: bytes) -> bool:
    """Whether a payload is one that the server must take: the right length, finite, and short enough."""
    if len(data) != 4 * WIDTH:
        return False
    with np.errstate(invalid="ignore"):  # numpy warns of a signalling NaN
        norm = float(np.linalg.norm(np.frombuffer(data, dtype="<f4").astype(np.float64)))
    return math.isfinite(norm) and norm <= 1.0


class Reply:
    """A node's reply without the metadata that Flower fills in."""

    def __init__(self, content: RecordDict | None, node: int = 1, error: Error | None = None) -> None:
        self.content, self.error = content, error
        self.metadata = type("M", (), {"src_node_id": node})()

    def has_error(self) -> bool:
        return self.error is not None

    def has_content(self) -> bool:
        return self.content is not None


class Post:
    """A grid that knows each node's reply beforehand. A reply that is an exception cannot be unpacked."""

    def __init__(self, replies: dict[int, Any]) -> None:
        self.replies = replies

    def push_messages(self, messages: list[Message]) -> list[str]:
        self.nonces = {m.metadata.dst_node_id: m.content[wire.HEAD]["nonce"] for m in messages}
        return [str(m.metadata.dst_node_id) for m in messages]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        reply = self.replies[int(ids[0])]
        if isinstance(reply, Exception):
            raise reply
        if reply is not None and reply.content is not None and wire.HEAD in reply.content:
            head = reply.content[wire.HEAD]
            if isinstance(head, ConfigRecord) and head.get("nonce") == NONCE:
                head["nonce"] = self.nonces[int(ids[0])]
        return [] if reply is None else [reply]


@pytest.fixture(autouse=True)
def refusals() -> Iterator[list[str]]:
    """What the server's log says, off the screen."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    before, FLOWER_LOGGER.handlers = FLOWER_LOGGER.handlers, [handler]
    yield lines
    FLOWER_LOGGER.handlers = before


def summed(replies: dict[int, Any]) -> tuple[torch.Tensor, Exchange]:
    """What the server adds up of these replies: the path of `Asked.map_clients`."""
    exchange = Exchange(Post(replies), 0.02)
    question = (
        {"clip_norm": 1.0, "bit_weight": 0.0, "noise_multiplier": 1.0, "client": 0, "constants": ""},
        {"start": bytes(4 * WIDTH)},
    )
    total = torch.zeros(WIDTH, dtype=torch.float64)
    for _, said in exchange.ask("update", ROUND, dict.fromkeys(replies, question), 4 * WIDTH):
        row = torch.from_numpy(np.frombuffer(said["array"], dtype="<f4").copy())[None]
        bounded, _, _ = Bounding().accept(row, 1.0)
        total += bounded.value[0].double()
    return total, exchange


HONEST = torch.from_numpy(np.frombuffer(GOOD, dtype="<f4").copy()).double()


MANY = 2000 if os.environ.get("FEDBLUR_LONG") == "1" else 500


@settings(max_examples=MANY, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(contents())
def test_fuzz__no_malformed_reply_reaches_the_sum_or_stops_the_server(content: RecordDict) -> None:
    honest = RecordDict({wire.HEAD: ConfigRecord({"round": ROUND, "nonce": NONCE}), wire.ARRAYS: raw(GOOD)})
    total, exchange = summed({1: Reply(content, 1), 2: Reply(honest, 2)})
    assert torch.equal(total, HONEST)
    assert exchange.traffic.answered >= 1


@settings(max_examples=200, deadline=None)
@given(heads, st.sampled_from(sorted(REPLIES)))
def test_fuzz__replies_of_every_kind_are_read_or_refused(head: dict[str, Any], kind: str) -> None:
    reply = Reply(RecordDict({wire.HEAD: ConfigRecord({"round": ROUND, "nonce": NONCE} | head)}))
    try:
        values = read_reply(reply, kind, ROUND, NONCE, 10)
    except Refused:
        return
    assert set(values) == set(REPLIES[kind].values)


@pytest.mark.parametrize(
    "bad",
    [
        Reply(None, 1, Error(1, "secret text of a node")),
        Reply(RecordDict({wire.HEAD: ConfigRecord({"round": ROUND, "nonce": NONCE}), wire.ARRAYS: raw(GOOD)}), node=2),
        ValueError("cannot be unpacked"),
        KeyError("chunk"),
        None,
    ],
    ids=["error", "another node's", "not unpackable", "broken chunks", "none"],
)
def test_reply__that_is_no_reply_counts_as_zero_and_is_logged(bad: Any, refusals: list[str]) -> None:
    total, exchange = summed({1: bad})
    assert not total.any()
    assert (exchange.traffic.answered, exchange.traffic.refused + exchange.traffic.missing) == (0, 1)
    (line,) = refusals
    assert "node 1" in line
    assert "secret" not in line


def test_reply__a_duplicate_is_never_looked_at() -> None:
    """Once a question is answered it is closed: the grid is not asked for it again."""
    honest = RecordDict({wire.HEAD: ConfigRecord({"round": ROUND, "nonce": NONCE}), wire.ARRAYS: raw(GOOD)})
    post = Post({1: Reply(honest, 1), 2: None})
    pulls: list[str] = []
    pull = post.pull_messages
    post.pull_messages = lambda ids: (pulls.extend(ids), pull(ids))[1]
    exchange = Exchange(post, 0.3)
    question = (
        {"clip_norm": 1.0, "bit_weight": 0.0, "noise_multiplier": 1.0, "client": 0, "constants": ""},
        {"start": b""},
    )
    assert len(list(exchange.ask("update", ROUND, {1: question, 2: question}, 4 * WIDTH))) == 1
    assert pulls.count("1") == 1
    assert pulls.count("2") > 1


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 0.51])
def test_central__a_bad_update_counts_as_zero_and_the_run_goes_on(tmp_path: Path, value: float) -> None:
    """0.51 is a coordinate above the clip norm of 0.5: the trusted server checks what clients claim to have clipped."""

    def poison(question: Message, reply: Message) -> Message:
        if question.metadata.dst_node_id == 101:
            record = reply.content.array_records[wire.ARRAYS]
            data = bytearray(record["update"].data)
            data[:4] = floats(value)
            reply.content[wire.ARRAYS] = ArrayRecord(
                {"update": Array(dtype="bytes", shape=(len(data),), stype="fedblur.raw", data=bytes(data))}
            )
        return reply

    task = deployment(tmp_path, 4, epsilon=None, noise_multiplier=0.0, clip_norm=0.5)
    run = federated(task, LoopGrid(task, 4, "central", poison), tmp_path / "run", "central")
    assert [row["local_only"]["nodes"]["refused"] for row in run.rounds] == [1, 1, 1]
    without = federated(
        task, LoopGrid(task, 4, "central", lambda q, r: lose(q, r, 101)), tmp_path / "without", "central", deadline=0.2
    )
    assert torch.equal(weights(run), weights(without))


def lose(question: Message, reply: Message, node: int) -> Message:
    if question.metadata.dst_node_id == node:
        raise Lost
    return reply


def test_central__a_cohort_of_liars_does_not_stop_the_run(tmp_path: Path) -> None:
    def lie(question: Message, reply: Message) -> Message:
        return Message(Error(0, "no"), reply_to=question)

    task = deployment(tmp_path, 4)
    run = federated(task, LoopGrid(task, 4, "central", lie), tmp_path / "run", "central")
    assert run.summary["status"] == "complete"
    assert run.rounds[-1]["local_only"]["nodes"]["refused"] == 4


# --- what nodes say, and to whom ---


def test_replies__hold_the_update_and_nothing_else(tmp_path: Path) -> None:
    task = deployment(tmp_path, 3)
    grid = LoopGrid(task, 3, "central")
    federated(task, grid, tmp_path / "run", "central")
    for reply in grid.received:
        assert set(reply.content) == {wire.HEAD, wire.ARRAYS}
        assert set(reply.content[wire.HEAD]) == {"round", "nonce"}
        assert set(reply.content[wire.ARRAYS]) == {"update"}
        assert not reply.content.metric_records
    with pytest.raises(Refused, match="not on the list"):
        wire.build(REPLIES["update"], 1, b"", {"loss": 0.3}, {"update": b""})
    with pytest.raises(Refused, match="not on the list"):
        wire.build(REPLIES["update"], 1, b"", {}, {"update": b"", "samples": b""})


def test_replies__an_exceptions_text_stays_on_the_node(tmp_path: Path) -> None:
    """Flower itself would send the text of an exception to the server."""

    def broken(node: Any) -> Any:
        raise ValueError("patient 4711 has a bad record")

    task = deployment(tmp_path, 3)
    grid = LoopGrid(replace(task, client_data=broken), 3, "central")
    run = federated(task, grid, tmp_path / "run", "central")
    assert run.rounds[0]["local_only"]["nodes"]["refused"] == 3
    for reply in grid.received:
        assert not reply.has_error()
        assert dict(reply.content[wire.HEAD]).keys() == {"round", "nonce", "refused"}
        assert b"4711" not in b"".join(obj.deflate() for obj in [reply.content[wire.HEAD]])


@pytest.mark.parametrize(("trust", "first"), [("central", "update"), ("secure-sum", "keys")])
def test_node__answers_for_no_round_twice(trust: str, first: str, tmp_path: Path) -> None:
    """`first`: the question that opens a round at a node."""
    task = deployment(tmp_path, 4, mechanism=SECURE if trust == "secure-sum" else "gaussian", rounds=2)
    grid = LoopGrid(task, 4, trust)
    federated(task, grid, tmp_path / "run", trust)
    asked = [message for message in grid.asked if kind_of(message) == first][-1]
    again = grid.app(asked, grid.contexts[asked.metadata.dst_node_id])
    assert again.content[wire.HEAD].get("refused") is True


def test_node__may_insist_on_a_trust_model(tmp_path: Path) -> None:
    """A node that joined for secure sums never sends a bare update, whatever the run asks for."""
    task = deployment(tmp_path, 3)
    grid = LoopGrid(task, 3, "central")
    for context in grid.contexts.values():
        context.node_config["trust"] = "secure-sum"
    run = federated(task, grid, tmp_path / "run", "central")
    assert [row["local_only"]["nodes"]["answered"] for row in run.rounds] == [0, 0, 0]
    assert not any(reply.content.array_records for reply in grid.received)


def test_secure_sum__bare_updates_are_not_given(tmp_path: Path) -> None:
    """The question `update` in a run that is declared a secure sum."""
    task = deployment(tmp_path, 3)
    grid = LoopGrid(task, 3, "secure-sum")
    run = federated(task, grid, tmp_path / "run", "central")
    assert run.rounds[0]["local_only"]["nodes"]["answered"] == 0
    assert {kind_of(message) for message in grid.asked} == {"update"}


@pytest.mark.parametrize(
    ("key", "value"),
    [("clip_norm", 50.0), ("bit_weight", 1.0), ("noise_multiplier", 0.01), ("round", 4), ("constants", "00")],
)
def test_node__holds_the_server_to_its_own_configuration(tmp_path: Path, key: str, value: float | str) -> None:
    """A larger clip norm, less noise, more rounds or other frozen weights than the node has are refused."""
    changes = {"mechanism": SECURE, "rounds": 3}
    task = deployment(tmp_path, 3, **changes)
    grid = LoopGrid(task, 3, "secure-sum")
    calls = grid.app._registered_funcs["train.masked"]

    def meddled(message: Message, context: Any) -> Message:
        if key == "round":
            message.content[wire.HEAD]["round"] = context.state["fedblur.member"]["round_"] = 4
        else:
            message.content[wire.HEAD][key] = value
        return calls(message, context)

    grid.app._registered_funcs["train.masked"] = meddled
    run = federated(task, grid, tmp_path / "run", "secure-sum", deadline=0.2)
    assert all("aborted" in row["local_only"] for row in run.rounds)
    assert not any(reply.content.array_records.get(wire.ARRAYS) for reply in grid.received)
