"""Replies that are announced and never come, that are huge, or that the SuperLink stumbles over.

The grid is Flower's own. Only its HTTP client is a stand-in, which says what a SuperLink says.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, ObjectTree, PullObjectResponse, PushObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid
from flwr.superlink.grid.http_grid import HttpGrid

from fedblur.engines.flower import wire
from fedblur.engines.flower.exchange import Exchange

RUN = 7
UPDATE = ({"clip_norm": 1.0, "bit_weight": 0.0, "noise_multiplier": 1.0, "client": 0}, {"start": bytes(8)})
LENGTH = len("update 1")


class Link:
    """A SuperLink with one reply for each node. `after`: seconds until a node's reply is announced, then uploaded."""

    def __init__(self, after: dict[int, tuple[float, float]], data: dict[int, bytes] | None = None) -> None:
        self.after, self.data = after, data or {}
        self.replies: dict[str, tuple[int, Any, ObjectTree]] = {}
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.pulled = 0  # bytes
        self.confirmed: list[str] = []

    def PushMessages(self, request: Any) -> PushAppMessagesResponse:
        self.born, self.questions, self.parts = time.monotonic(), request.messages_list, dict[str, bytes]()
        trees = [tree for root in request.message_object_trees for tree in iterate_object_tree(root)]
        return PushAppMessagesResponse(
            message_ids=[question.metadata.message_id for question in self.questions],
            objects_to_push=[tree.object_id for tree in trees],
            session_id="s",
        )

    def PushObject(self, request: Any) -> PushObjectResponse:
        self.parts[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def answer(self) -> None:
        """What each node replies to its question."""
        for message_id in (question.metadata.message_id for question in self.questions):
            question = inflate_object_from_contents(message_id, dict(self.parts))
            question.metadata.__dict__["_message_id"] = message_id
            node, head = question.metadata.dst_node_id, question.content[wire.HEAD]
            update = {"update": self.data.get(node, f"update {node}".encode())}
            reply = Message(
                wire.build(wire.REPLIES["update"], head["round"], head["nonce"], {}, update), reply_to=question
            )
            reply.metadata.__dict__.update(_src_node_id=node)
            self.objects |= {name: (node, part.deflate()) for name, part in get_all_nested_objects(reply).items()}
            reply.metadata.__dict__.update(_message_id=reply.object_id)
            announced = message_to_proto(remove_content_from_message(reply))
            self.replies[message_id] = node, announced, get_object_tree(reply)

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        if not self.replies and not self.objects:
            self.answer()
        (message_id,) = request.message_ids
        node, proto, tree = self.replies.get(message_id, (0, None, None))
        if proto is None or time.monotonic() - self.born < self.after[node][0]:
            return PullAppMessagesResponse()
        del self.replies[message_id]  # an announcement is handed out once
        return PullAppMessagesResponse(messages_list=[proto], message_object_trees=[tree])

    def PullObject(self, request: Any) -> PullObjectResponse:
        node, content = self.objects[request.object_id]
        if time.monotonic() - self.born < sum(self.after[node]):
            return PullObjectResponse(object_found=True, object_available=False)
        self.pulled += len(content)
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> ConfirmMessageReceivedResponse:
        self.confirmed.append(request.message_object_id)
        return ConfirmMessageReceivedResponse()


@pytest.fixture(autouse=True)
def flower() -> Iterator[None]:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 1
    yield
    assert http_grid.pull_objects is pull_objects  # as Flower has it, whatever happened


def grid_of(link: Any) -> HttpGrid:
    grid = HttpGrid(token="none")
    grid._client, grid._run = link, SimpleNamespace(run_id=RUN)
    return grid


def asked(link: Any, deadline: float, nodes: list[int]) -> tuple[list[int], float, Exchange]:
    """Who answered, in order; how long it took; and the exchange."""
    exchange = Exchange(grid_of(link), deadline)
    start = time.monotonic()
    got = [node for node, _ in exchange.ask("update", 4, dict.fromkeys(nodes, UPDATE), LENGTH)]
    return got, time.monotonic() - start, exchange


def test_flower__still_fetches_a_replys_parts_with_the_function_that_is_held_to_limits() -> None:
    """A Flower that moves it must fail here, not in a federation: `pulling.py` puts its own in this place."""
    assert http_grid.pull_objects is pull_objects
    assert "pull_objects" in HttpGrid.pull_messages.__code__.co_names
    options = {"max_time", "max_tries_per_object", "initial_backoff", "backoff_cap"}
    assert options <= set(inspect.signature(pull_objects).parameters)


def test_stall__a_reply_that_is_announced_and_never_uploaded_ends_with_the_deadline() -> None:
    got, seconds, exchange = asked(Link({1: (0, 99)}), 1.0, [1])
    assert not got
    assert seconds < 3.0  # Flower's own wait: 7,200 s, or until the node's session is over
    assert exchange.traffic.missing + exchange.traffic.refused == 1


def test_stall__others_replies_are_taken_meanwhile() -> None:
    """Nodes 1 and 2 stall; 3 has answered long ago, 4 answers while they stall."""
    got, seconds, _ = asked(Link({1: (0, 99), 2: (0, 99), 3: (0, 0), 4: (1.5, 0)}), 3.0, [1, 2, 3, 4])
    assert got == [3, 4]
    assert seconds < 5.0


def test_stall__a_slow_upload_is_waited_for() -> None:
    """Longer than a slice: the reply is announced once, so giving up and asking again would lose it."""
    link = Link({1: (0, 1.5), 2: (0.3, 0)})
    got, seconds, exchange = asked(link, 20.0, [1, 2])
    assert got == [2, 1]
    assert seconds < 5.0
    assert len(link.confirmed) == 2
    assert exchange.traffic.answered == 2


def test_stall__a_server_that_stops_does_not_wait_for_the_deadline() -> None:
    exchange = Exchange(grid_of(Link({1: (0, 99), 2: (0, 0)})), 99.0)
    start = time.monotonic()
    for _ in exchange.ask("update", 4, {1: UPDATE, 2: UPDATE}, LENGTH):
        break  # as an exception in the server's loop would
    assert time.monotonic() - start < 5.0


def test_size__a_reply_is_given_up_as_soon_as_it_is_longer_than_any_honest_one() -> None:
    link = Link({1: (0, 0), 2: (0, 0)}, {1: os.urandom(100 * 2**20)})  # five chunks
    got, _, exchange = asked(link, 5.0, [1, 2])
    assert got == [2]
    assert exchange.traffic.refused == 1
    assert link.pulled < 70 * 2**20  # two chunks are on their way at once


def test_size__a_reply_of_very_many_parts_is_not_fetched() -> None:
    class Crumbs(Link):
        def answer(self) -> None:
            super().answer()
            crumbs = [f"{i:064x}" for i in range(3000)]
            self.objects |= dict.fromkeys(crumbs, (1, b"crumb"))
            (tree,) = [tree for node, _, tree in self.replies.values() if node == 1]
            tree.children.extend(ObjectTree(object_id=crumb) for crumb in crumbs)

    link = Crumbs({1: (0, 0), 2: (0, 0)})
    got, _, exchange = asked(link, 5.0, [1, 2])
    assert got == [2]
    assert exchange.traffic.refused == 1
    assert link.pulled < 3000


@pytest.mark.parametrize("members", [2, 100])
@pytest.mark.parametrize("kind", sorted(wire.REPLIES))
def test_size__every_honest_reply_fits(kind: str, members: int) -> None:
    """With the longest values that are accepted at all."""
    values: dict[str, Any] = {
        name: [bytes(4096)] * members if isinstance(form, tuple) else bytes(4096)
        for name, form in wire.REPLIES[kind].values.items()
    }
    arrays = {name: bytes(10**6) for name in wire.REPLIES[kind].arrays}
    reply = wire.build(wire.REPLIES[kind], 1, bytes(16), values, arrays)
    sent = sum(len(part.deflate()) for part in get_all_nested_objects(reply).values())
    assert sent < wire.longest(kind, members, 10**6) < sent + 2**17 + 4096 * members


class Stumbling(Link):
    """A SuperLink that answers 500 for node 1's question, as for a reply whose ttl is not a number."""

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        if request.message_ids[0] == self.questions[0].metadata.message_id:
            there = httpx.Request("POST", "https://127.0.0.1:8000/v1/runtime/pull-messages")
            raise httpx.HTTPStatusError("500", request=there, response=httpx.Response(500, request=there))
        return super().PullMessages(request)


def test_status__about_one_question_leaves_it_open_until_the_deadline() -> None:
    got, seconds, exchange = asked(Stumbling({1: (0, 0), 2: (0.5, 0)}), 1.5, [1, 2])
    assert got == [2]
    assert 1.4 < seconds < 4.0
    assert exchange.traffic.missing == 1


def test_status__a_superlink_that_cannot_be_reached_stops_the_server() -> None:
    class Away(Link):
        def PullMessages(self, request: Any) -> PullAppMessagesResponse:
            raise httpx.ConnectError("connection refused")

    with pytest.raises(httpx.ConnectError):
        asked(Away({1: (0, 0)}), 5.0, [1])
