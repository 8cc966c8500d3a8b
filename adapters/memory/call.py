"""One call of `enqueue`, on its way through the capacity gate."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ...streams.errors import HeadraceError
from ...streams.events import EventBatch
from ...streams.producer_ledger import LastCall, ProducerLedger
from ..seam import ProducerSequence, Receipt

Placed: TypeAlias = tuple[int, EventBatch]
"""A batch and the index of its queue."""


class EnqueueCall:
    """Stores its batches slice by slice, then sets its answer. Once a slice is stored, all others are stored too, even
    if the call is cancelled.

    The check for duplicates is made when the call's turn comes, because earlier calls may still wait before it.
    """

    def __init__(
        self,
        slices: Sequence[Sequence[Placed]],
        sequence: ProducerSequence | None,
        store: Callable[[Sequence[Placed]], Sequence[Receipt]],
        ledger: ProducerLedger,
    ) -> None:
        self.answer: asyncio.Future[Sequence[Receipt]] = asyncio.get_running_loop().create_future()
        self._batches = sum(map(len, slices))
        self._slices = deque(slices or [()])  # a call without batches still uses its sequence
        self._sequence = sequence
        self._store = store
        self._ledger = ledger
        self._receipts: list[Receipt] = []

    @property
    def has_begun(self) -> bool:
        """Whether some batches of the call are stored."""
        return bool(self._receipts)

    @property
    def weight(self) -> int:
        return sum(map(events_of, self._slices[0])) if self._must_store else 0

    def enter(self) -> bool:
        if not self._must_store:
            self._answer_without_storing()
            return True
        self._receipts += self._store(self._slices.popleft())
        if self._slices:
            return False
        self._finish()
        return True

    def fail(self, error: HeadraceError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    @property
    def _must_store(self) -> bool:
        if self.has_begun:
            return True
        if self.answer.cancelled():
            return False
        return self._sequence is None or self._ledger.last(self._sequence.producer).accepts(self._sequence)

    def _answer_without_storing(self) -> None:
        if self._sequence is None or self.answer.done():
            return
        try:
            last = self._ledger.last(self._sequence.producer)
            self.answer.set_result(last.answer(self._sequence, self._batches))
        except HeadraceError as error:
            self.fail(error)

    def _finish(self) -> None:
        if self._sequence is not None:
            offsets = [token.offset for token, _ in self._receipts if token]
            self._ledger.record(self._sequence.producer, LastCall(self._sequence.number, offsets))
        if not self.answer.done():
            self.answer.set_result(self._receipts)


def events_of(placed: Placed) -> int:
    return placed[1].count
