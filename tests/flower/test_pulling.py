"""Replies that are announced and never come, that are huge, or that the SuperLink stumbles over.

The grid is Flower's own. Only its HTTP client is a stand-in, which says what a SuperLink says.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import islice
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

from fedblur.flower import wire
from fedblur.flower.exchange import Exchange

RUN = 7
UPDATE = (
    {"clip_norm": 1.0, "bit_weight": 0.0, "noise_multiplier": 1.0, "client": 0, "constants": ""},
    {"start": bytes(8)},
)
LENGTH = len("update 1")
LONG = 120.0  # seconds: a deadline that no test waits for
NEVER = 60  # tries for a part of a stalled reply; then it comes after all, so that waiting for it is seen and ends


class Link:
    """A SuperLink with one reply for each node. No clock decides when it comes, only what was asked before.

    `stalled` nodes announce their reply and do not upload it. A node in `behind` announces its reply when that of the
    other node has been taken; one in `slow` uploads its own then, and after two tries of each part.
    """

    def __init__(
        self,
        stalled: Collection[int] = (),
        behind: dict[int, int] | None = None,
        slow: dict[int, int] | None = None,
        data: dict[int, bytes] | None = None,
    ) -> None:
        self.stalled, self.behind, self.slow, self.data = stalled, behind or {}, slow or {}, data or {}
        self.replies: dict[str, tuple[int, Any, ObjectTree]] = {}
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.tries = Counter[str]()
        self.pulled = 0  # bytes
        self.confirmed: list[int] = []

    def uploaded(self, node: int, object_id: str) -> bool:
        self.tries[object_id] += 1
        if node in self.stalled:
            return self.tries[object_id] > NEVER
        return node not in self.slow or (self.slow[node] in self.confirmed and self.tries[object_id] > 2)

    def PushMessages(self, request: Any) -> PushAppMessagesResponse:
        self.questions, self.parts = request.messages_list, dict[str, bytes]()
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
        if proto is None or (node in self.behind and self.behind[node] not in self.confirmed):
            return PullAppMessagesResponse()
        del self.replies[message_id]  # an announcement is handed out once
        return PullAppMessagesResponse(messages_list=[proto], message_object_trees=[tree])

    def PullObject(self, request: Any) -> PullObjectResponse:
        node, content = self.objects[request.object_id]
        if not self.uploaded(node, request.object_id):
            return PullObjectResponse(object_found=True, object_available=False)
        self.pulled += len(content)
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> ConfirmMessageReceivedResponse:
        self.confirmed.append(self.objects[request.message_object_id][0])
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


def asked(link: Any, deadline: float, nodes: list[int], most: int | None = None) -> tuple[list[int], Exchange]:
    """Who answered, in order, and the exchange. After `most` answers the server stops, as by an exception."""
    exchange = Exchange(grid_of(link), deadline)
    replies = exchange.ask("update", 4, dict.fromkeys(nodes, UPDATE), LENGTH)
    got = [node for node, _ in islice(replies, most)]
    replies.close()
    return got, exchange


def test_flower__still_fetches_a_replys_parts_with_the_function_that_is_held_to_limits() -> None:
    """A Flower that moves it must fail here, not in a federation: `pulling.py` puts its own in this place."""
    assert http_grid.pull_objects is pull_objects
    assert "pull_objects" in HttpGrid.pull_messages.__code__.co_names
    options = {"max_time", "max_tries_per_object", "initial_backoff", "backoff_cap"}
    assert options <= set(inspect.signature(pull_objects).parameters)


def test_stall__a_reply_that_is_announced_and_never_uploaded_ends_with_the_deadline() -> None:
    link = Link(stalled=[1])
    got, exchange = asked(link, 1.0, [1])
    assert not got
    assert 0 < max(link.tries.values()) < NEVER  # Flower's own wait: 7,200 s, or until the node's session is over
    assert exchange.traffic.missing + exchange.traffic.refused == 1


def test_stall__others_replies_are_taken_meanwhile() -> None:
    """Nodes 1 and 2 stall; 3 has answered long ago, 4 answers while they stall."""
    link = Link(stalled=[1, 2], behind={4: 3})
    assert asked(link, LONG, [1, 2, 3, 4], most=2)[0] == [3, 4]


def test_stall__a_slow_upload_is_waited_for() -> None:
    """Longer than a slice: the reply is announced once, so giving up and asking again would lose it."""
    link = Link(slow={1: 2})
    got, exchange = asked(link, LONG, [1, 2])
    assert got == [2, 1]
    assert link.confirmed == [2, 1]
    assert exchange.traffic.answered == 2


def test_stall__a_server_that_stops_does_not_wait_for_the_deadline() -> None:
    link = Link(stalled=[1])
    assert asked(link, LONG, [1, 2], most=1)[0] == [2]
    assert 0 < max(link.tries.values()) < NEVER


def test_size__a_reply_is_given_up_as_soon_as_it_is_longer_than_any_honest_one() -> None:
    link = Link(data={1: os.urandom(100 * 2**20)})  # five chunks
    got, exchange = asked(link, LONG, [1, 2])
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

    link = Crumbs()
    got, exchange = asked(link, LONG, [1, 2])
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

    stumbled = 0

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        if request.message_ids[0] == self.questions[0].metadata.message_id:
            self.stumbled += 1
            self.confirmed += [1] if self.stumbled == 3 else []  # now node 2 may announce its reply
            there = httpx.Request("POST", "https://127.0.0.1:8000/v1/runtime/pull-messages")
            raise httpx.HTTPStatusError("500", request=there, response=httpx.Response(500, request=there))
        return super().PullMessages(request)


def test_status__about_one_question_leaves_it_open_until_the_deadline() -> None:
    link = Stumbling(behind={2: 1})
    assert asked(link, LONG, [1, 2], most=1)[0] == [2]
    assert link.stumbled >= 3  # asked again and again, meanwhile
    got, exchange = asked(Stumbling(), 1.0, [1])
    assert not got
    assert exchange.traffic.missing == 1


def test_status__a_superlink_that_cannot_be_reached_stops_the_server() -> None:
    class Away(Link):
        def PullMessages(self, request: Any) -> PullAppMessagesResponse:
            raise httpx.ConnectError("connection refused")

    with pytest.raises(httpx.ConnectError):
        asked(Away(), LONG, [1])
