"""Events that tasks publish at the same time share a call of the adapter, which costs less than a call for each.

Each event keeps a batch of its own: what fails or is delivered together is what the user has published together. A call
is made at the end of the current turn of the event loop, so no event waits for others.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Callable, Sequence

from ..adapters import Receipt
from ..streams.errors import HeadraceError
from ..streams.events import EventBatch
from ..streams.publishing import PendingPublishes

MIN_PUBLISHES = 8
"""Publishes under way at which they begin to share calls. A few publishers gain nothing by it."""
MAX_BATCHES = 1000
MAX_BYTES = 1 << 20
"""Limits of a shared call. A larger one would be stored at the same cost per event."""


class SharedCalls:
    """Collects batches of several callers. `store` is called with them, in the order of `add`."""

    def __init__(
        self,
        store: Callable[[Sequence[tuple[int, EventBatch]]], Awaitable[Sequence[Receipt]]],
        publishing: PendingPublishes,
    ) -> None:
        """The batches of a call count as publishes under way until their callers have their answers."""
        self._store = store
        self._publishing = publishing
        self._loop = asyncio.get_running_loop()
        self.waiting: list[tuple[int, EventBatch]] = []
        """Batches that wait for the end of the turn, each with its queue."""
        self._answers: list[Future[Receipt]] = []
        self._nbytes = 0
        self._ends_turn = False
        """Whether `_end_turn` is going to be called."""

    def add(self, queue: int, batch: EventBatch) -> Future[Receipt]:
        """Store a batch with the next call. The future gets the receipt, or the error of `store`.

        A cancelled caller's batch is stored all the same.
        """
        size = len(batch.encoded)
        if self._nbytes + size > MAX_BYTES or len(self.waiting) == MAX_BATCHES:
            self.flush()
        if not self._ends_turn:
            self._ends_turn = True
            self._loop.call_soon(self._end_turn)
        self.waiting.append((queue, batch))
        self._nbytes += size
        answer: Future[Receipt] = Future(loop=self._loop)  # as `create_future`, without a call
        self._answers.append(answer)
        return answer

    def flush(self) -> None:
        """Store everything that waits, so that later calls come after it."""
        if not self.waiting:
            return
        batches, answers = self.waiting, self._answers
        self.waiting, self._answers, self._nbytes = [], [], 0
        count = len(batches)
        number = self._publishing.begin(count)
        try:
            stored = asyncio.ensure_future(self._store(batches))
        except Exception as error:  # noqa: BLE001 (each publisher gets it)
            _fail(answers, error)
            self._publishing.end(number, count)
            return
        stored.add_done_callback(lambda done: _answer(answers, done))
        # End them only after the callers' next step: what the callers publish in it then shares a call, too.
        stored.add_done_callback(lambda _: self._loop.call_soon(self._publishing.end, number, count))

    def _end_turn(self) -> None:
        self._ends_turn = False
        self.flush()


def _answer(answers: Sequence[Future[Receipt]], stored: Future[Sequence[Receipt]]) -> None:
    if stored.cancelled():
        for answer in answers:
            answer.cancel()
    elif (error := stored.exception()) is not None:
        _fail(answers, error)
    else:
        for answer, receipt in zip(answers, stored.result(), strict=True):
            if not answer.done():
                answer.set_result(receipt)


def _fail(answers: Sequence[Future[Receipt]], error: BaseException) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(error.copy() if isinstance(error, HeadraceError) else error)
