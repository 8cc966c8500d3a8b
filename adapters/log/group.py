"""A group of `enqueue` calls that one transaction stores."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Sequence
from typing import Any

from ...streams.errors import SequenceConflict
from ...streams.events import EventBatch
from ...streams.identity import SequenceToken
from ..seam import ProducerSequence, Receipt
from .blocks import BlockEncoder, BlockPlace, split
from .rows import ProducerRow, Tail
from .sequences import duplicate_receipts, is_duplicate, producer_key, producer_row
from .transactions import Changes


class CommitRequest:
    """A call of `enqueue` that waits for a commit, and the future that its caller awaits."""

    __slots__ = ("answer", "batches", "nbytes", "producer", "sequence")

    def __init__(
        self,
        batches: Sequence[tuple[int, EventBatch]],
        nbytes: int,
        answer: Future[Sequence[Receipt]],
        sequence: ProducerSequence | None = None,
    ) -> None:
        """Raises InvalidArgument for a sequence that cannot be stored."""
        self.batches = batches
        self.nbytes = nbytes
        self.answer = answer
        self.sequence = sequence
        self.producer = producer_key(sequence) if sequence else b""


_tuple: Any = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

Outcome = Sequence[Receipt] | SequenceConflict


class CommitGroup:
    """Collects the batches of calls, then writes them: `add` each call, then `write`."""

    def __init__(self, changes: Changes, encoder: BlockEncoder, now_us: int) -> None:
        self._changes = changes
        self._encoder = encoder
        self._now_us = now_us
        self._queues: dict[int, _QueueGrowth] = {}
        self._producers: dict[bytes, ProducerRow | None] = {}

    def add(self, call: CommitRequest) -> Outcome:
        """Add all batches of a call, or none if it is a duplicate or a conflict. Return its receipts or its error."""
        sequence = call.sequence
        if sequence is None:
            return self._place(call.batches)
        last = self._last(call.producer)
        try:
            if is_duplicate(sequence, last):
                return duplicate_receipts(sequence, last, len(call.batches))
        except SequenceConflict as conflict:
            return conflict
        receipts = self._place(call.batches)
        self._producers[call.producer] = producer_row(sequence, self._now_us, receipts)
        return receipts

    def write(self) -> set[int]:
        """Write all batches and producers. Return the queues that have grown."""
        for queue, growth in self._queues.items():
            growth.write(self._changes, self._encoder, queue, self._now_us)
        for producer, row in self._producers.items():
            if row is not None:
                self._changes.put_producer(producer, row)
        return set(self._queues)

    def _last(self, producer: bytes) -> ProducerRow | None:
        if producer not in self._producers:
            self._producers[producer] = self._changes.producer(producer)
        return self._producers[producer]

    def _place(self, batches: Sequence[tuple[int, EventBatch]]) -> list[Receipt]:
        queues = self._queues
        receipts: list[Receipt] = []
        for queue, batch in batches:
            growth = queues.get(queue)
            if growth is None:
                growth = queues[queue] = _QueueGrowth(self._changes.tail(queue))
            # Equals Receipt(SequenceToken(growth.next)), at a third of its cost.
            receipts.append(_tuple(Receipt, (_tuple(SequenceToken, (growth.next, 0)), False)))
            growth.next += 1
            growth.batches.append(batch)
        return receipts


class _QueueGrowth:
    """The new batches of one queue."""

    __slots__ = ("batches", "next", "tail")

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.next = tail.next
        self.batches: list[EventBatch] = []

    def write(self, changes: Changes, encoder: BlockEncoder, queue: int, now_us: int) -> None:
        time_us = max(now_us, self.tail.time_us)
        offset, nbytes = self.tail.next, self.tail.nbytes
        for batches in split(self.batches):
            with encoder.encode(BlockPlace(queue, offset), batches, time_us) as record:
                changes.append(queue, offset, record)
                nbytes += len(record)
            offset += len(batches)
        events = self.tail.events + sum(batch.count for batch in self.batches)
        changes.put_tail(queue, self.tail._replace(next=offset, events=events, nbytes=nbytes, time_us=time_us))
