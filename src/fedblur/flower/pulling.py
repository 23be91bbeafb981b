"""Taking replies from Flower's grid, so that no node can hold up the server or fill its memory.

A node announces its reply, then uploads what the reply is made of. `pull_messages` blocks until all of that is there:
up to two hours, for any number of bytes, and Flower has no argument for either. Asking again does not help: Flower
hands out an announcement once. So each pull has a thread and a slice of time: a reply that is not there by then stays
on its way while other nodes' replies are taken, until the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from logging import WARNING
from threading import Lock, Thread
from types import TracebackType

import httpx
from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_objects
from flwr.superlink.grid import http_grid

from fedblur.flower.wire import Refused

Reply = Message | Refused
_WHAT = "pull_objects"  # what `HttpGrid.pull_messages` fetches a reply's parts with
_SLICE, _LAST = 0.5, 0.2  # seconds that a pull gets at once; and that it gets however little is left
_RATE = 20e6  # bytes a second of a pull within this machine: large models get a longer slice
_FIRST, _CAP = 0.1, 0.5  # seconds between two tries for a part that is not uploaded
_PARTS = 32  # of a reply, beside one for each MiB; Flower's own replies have six, beside one for each 20 MiB


class Pulls:
    """The pulls of one question to many nodes. Within the block Flower's `HttpGrid` keeps to these limits."""

    def __init__(self, grid: Grid, end: float, most: int) -> None:
        self.grid, self.end, self.most = grid, end, most  # end: of time.monotonic; most: bytes of one reply
        self.running: dict[str, Future[Reply | None]] = {}
        self.failed: set[str] = set()

    def __enter__(self) -> Pulls:
        self.before = vars(http_grid)[_WHAT]  # a Flower that has it no more fails here
        vars(http_grid)[_WHAT] = self._parts
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end = 0.0  # whatever is still on its way gives up at its next try
        wait(self.running.values(), timeout=2 * _CAP)
        vars(http_grid)[_WHAT] = self.before

    def look(self, message_id: str) -> Reply | None:
        """Return a question's reply, or None while there is none."""
        future = self.running.pop(message_id, None)
        seconds = 0.0
        if future is None:
            future, seconds = Future(), _SLICE + self.most / _RATE
            # A daemon: one that hangs on a SuperLink that is away must not keep the process.
            Thread(target=self._settle, args=(future, message_id), daemon=True).start()
        left = max(self.end - time.monotonic(), _LAST)
        if wait([future], timeout=min(seconds, left)).done:
            return future.result()
        self.running[message_id] = future
        return None

    def _settle(self, future: Future[Reply | None], message_id: str) -> None:
        try:
            future.set_result(self._pull(message_id))
        except BaseException as error:  # for `look` to raise, in the server's own thread
            future.set_exception(error)

    def _pull(self, message_id: str) -> Reply | None:
        try:
            return next(iter(self.grid.pull_messages([message_id])), None)
        except httpx.HTTPStatusError as error:  # a reply on which the SuperLink itself fails: the deadline decides
            if message_id not in self.failed:
                status = error.response.status_code
                log(WARNING, "the SuperLink answers %d for question %s; waiting on", status, message_id[:12])
            self.failed.add(message_id)
            return None
        except httpx.HTTPError:  # the SuperLink, not a node
            raise
        except Refused as error:
            return error
        except Exception as error:  # whatever unpacking a hostile reply raises
            return Refused(f"it cannot be unpacked ({type(error).__name__})")

    def _parts(self, object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
        """Pull objects as Flower's `pull_objects` does, with an end and a limit."""
        if len(object_ids) > _PARTS + self.most // 2**20:
            raise Refused(f"it has {len(object_ids)} parts")
        lock, seen = Lock(), 0

        def one(object_id: str) -> bytes:
            nonlocal seen
            if time.monotonic() >= self.end:
                raise ObjectPullError(object_id, "the deadline is over")
            content = pull_object_fn(object_id)
            with lock:
                seen += len(content)
            if seen > self.most:
                raise Refused(f"it is longer than {self.most} bytes")
            return content

        return pull_objects(
            object_ids, one, max_time=None, max_tries_per_object=None, initial_backoff=_FIRST, backoff_cap=_CAP
        )
