"""Questions to nodes and their replies, over Flower's grid, until a deadline. What a node sends is hostile until read.

A reply that is malformed, late, a duplicate, of another round or from another node is refused, logged and left out: it
cannot raise. Replies are pulled one at a time (`pulling.py`), so that one that cannot even be unpacked, or that never
comes whole, takes no other with it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedblur.flower import wire
from fedblur.flower.pulling import Pulls, Reply
from fedblur.flower.wire import Refused

_SHORTEST, _LONGEST = 0.05, 1.0  # seconds between two looks for replies
Question = tuple[Mapping[str, Any], Mapping[str, bytes]]  # values, arrays


@dataclass
class Traffic:
    """The traffic of a round: what it asked for and got. local_only."""

    asked: int = 0
    answered: int = 0
    refused: int = 0
    missing: int = 0  # no reply before the deadline
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass
class Exchange:
    """The grid, with a deadline for every question."""

    grid: Grid
    deadline: float  # seconds
    traffic: Traffic = field(default_factory=Traffic)

    def ask(
        self, kind: str, round_: int, questions: Mapping[int, Question], length: int | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (node, what it says) for every valid reply, as they come. `length`: bytes of the reply's array."""
        pending = self._send(kind, round_, questions)
        end, pause = time.monotonic() + self.deadline, _SHORTEST
        with Pulls(self.grid, end, wire.longest(kind, len(questions), length or 0)) as pulls:
            while pending:
                for message_id in list(pending):
                    node, nonce = pending[message_id]
                    reply = pulls.look(message_id)
                    if reply is None:
                        continue
                    del pending[message_id]  # whatever else comes for this question is a duplicate
                    values = self._read(reply, kind, round_, node, nonce, length)
                    if values is not None:
                        yield node, values
                left = end - time.monotonic()
                if not pending or left <= 0:  # the last reply ends the wait, not the pause after it
                    break
                time.sleep(min(pause, left))
                pause = min(1.5 * pause, _LONGEST)
        self.traffic.missing += len(pending)
        for node, _ in pending.values():
            log(WARNING, "round %d: node %d gave no %s within %g s", round_, node, kind, self.deadline)

    def _send(self, kind: str, round_: int, questions: Mapping[int, Question]) -> dict[str, tuple[int, bytes]]:
        messages, nonces = [], []
        for node, (values, arrays) in questions.items():
            nonces.append((node, secrets.token_bytes(16)))
            content = wire.build(wire.QUESTIONS[kind], round_, nonces[-1][1], values, arrays)
            self.traffic.bytes_sent += wire.size(content)
            messages.append(Message(content, node, f"train.{kind}", ttl=self.deadline + 60, group_id=str(round_)))
        self.traffic.asked += len(messages)
        ids: Iterable[str | None] = self.grid.push_messages(messages) if messages else []
        sent = {message_id: to for message_id, to in zip(ids, nonces) if message_id}
        self.traffic.missing += len(messages) - len(sent)
        return sent

    def _read(
        self, reply: Reply, kind: str, round_: int, node: int, nonce: bytes, length: int | None
    ) -> dict[str, Any] | None:
        try:
            if isinstance(reply, Refused):
                raise reply
            if reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE:  # the SuperLink's own word
                log(WARNING, "round %d: node %d is not online", round_, node)
                self.traffic.missing += 1
                return None
            if reply.metadata.src_node_id != node and not reply.has_error():
                raise Refused("it comes from another node")
            values = wire.read_reply(reply, kind, round_, nonce, length)
        except Exception as error:
            self.refuse(round_, node, str(error) if isinstance(error, Refused) else type(error).__name__)
            return None
        self.traffic.answered += 1
        self.traffic.bytes_received += wire.size(reply.content)
        return values

    def refuse(self, round_: int, node: int, reason: str) -> None:
        """Write down why a node's reply counts as zero."""
        log(WARNING, "round %d: the reply of node %d is refused and counts as zero: %s", round_, node, reason)
        self.traffic.refused += 1
