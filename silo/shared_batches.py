"""Events that tasks publish to one stream at the same time share a batch.

A batch of a thousand events costs a twentieth of a thousand batches, for the publisher, the queue and the consumers.
A batch closes at the end of the current turn of the event loop, so no event waits for others.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..adapters import Receipt
from ..streams.errors import HeadraceError
from ..streams.events import EventBatch
from ..streams.identity import SequenceToken, StreamId

MIN_PUBLISHES = 8
"""Publishes under way at which events begin to share batches. A few publishers gain nothing by it."""
MAX_BYTES = 64 << 10
MAX_EVENTS = 1000
"""Limits of a shared batch. A larger one would be stored at the same cost per event."""

_new_tuple: Any = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class _OpenBatch:
    """Events that wait for the end of this turn of the loop, and the futures of their publishers."""

    __slots__ = ("answers", "nbytes", "payloads")

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.answers: list[Future[SequenceToken]] = []
        self.nbytes = 0


class SharedBatches:
    """Collects events by stream.

    `store` is called with each batch, in the order of its stream's events; `on_stored` when it is stored.
    """

    def __init__(
        self, store: Callable[[EventBatch], Awaitable[Sequence[Receipt]]], on_stored: Callable[[EventBatch], None]
    ) -> None:
        self._store = store
        self._on_stored = on_stored
        self._loop = asyncio.get_running_loop()
        self._stored_alone: set[StreamId] = set()
        """The streams of which an event was published in this turn of the loop. The first one is stored by itself."""
        self._open: dict[StreamId, _OpenBatch] = {}
        self._ends_turn = False
        """Whether `_end_turn` is going to be called."""

    @property
    def has_waiting(self) -> bool:
        """Whether there are events that wait for the end of the turn."""
        return bool(self._open)

    def add(self, stream: StreamId, payload: bytes) -> Future[SequenceToken] | None:
        """Let the event wait for others. None: the caller must store it by itself, at once.

        The future gets the token, or the error of `store`. A cancelled caller's event is stored all the same.
        """
        if stream not in self._stored_alone:
            self._stored_alone.add(stream)
            if not self._ends_turn:
                self._ends_turn = True
                self._loop.call_soon(self._end_turn)
            return None
        size = len(payload)
        found = self._open.get(stream)
        if found is None or found.nbytes + size > MAX_BYTES or len(found.payloads) == MAX_EVENTS:
            self._close(stream)
            if size > MAX_BYTES:
                return None
            found = self._open[stream] = _OpenBatch()
        found.payloads.append(payload)
        found.nbytes += size
        answer: Future[SequenceToken] = self._loop.create_future()
        found.answers.append(answer)
        return answer

    def flush(self) -> None:
        """Store everything that waits, so that later events come after it."""
        while self._open:
            self._close(next(iter(self._open)))

    def _end_turn(self) -> None:
        self._ends_turn = False
        self._stored_alone.clear()
        self.flush()

    def _close(self, stream: StreamId) -> None:
        found = self._open.pop(stream, None)
        if found is None:
            return
        try:
            batch = EventBatch.of(stream, found.payloads)
            stored = asyncio.ensure_future(self._store(batch))
        except Exception as error:  # noqa: BLE001 (each publisher gets it)
            _fail(found.answers, error)
            return
        answers = found.answers
        stored.add_done_callback(lambda done: self._answer(batch, answers, done))

    def _answer(
        self, batch: EventBatch, answers: Sequence[Future[SequenceToken]], stored: Future[Sequence[Receipt]]
    ) -> None:
        if stored.cancelled():
            for answer in answers:
                answer.cancel()
            return
        if (error := stored.exception()) is not None:
            _fail(answers, error)
            return
        self._on_stored(batch)
        token = stored.result()[0].token
        assert token is not None  # only duplicates of an idempotent producer have none
        offset = token.offset
        for index, answer in enumerate(answers):
            if not answer.done():
                answer.set_result(
                    _new_tuple(SequenceToken, (offset, index))
                )  # a third of the cost of SequenceToken(...)


def _fail(answers: Sequence[Future[SequenceToken]], error: BaseException) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(error.copy() if isinstance(error, HeadraceError) else error)
