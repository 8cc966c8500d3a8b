"""One group of calls, stored by one transaction."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Sequence
from typing import Any

from ...streams.errors import SequenceConflict
from ...streams.events import EventBatch
from ...streams.identity import SequenceToken
from ..seam import ProducerSequence, Receipt
from .blocks import BlockEncoder, split
from .rows import ProducerRow, Tail
from .sequences import duplicate_receipts, is_duplicate, noted, producer_key
from .transactions import Changes


class Call:
    """One call of `enqueue`, and the future that its caller waits for."""

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


class Group:
    """Collects what calls store, then writes it: `add` each call, then `write`."""

    def __init__(self, changes: Changes, encoder: BlockEncoder, now_us: int) -> None:
        self._changes = changes
        self._encoder = encoder
        self._now_us = now_us
        self._queues: dict[int, _Growth] = {}
        self._producers: dict[bytes, ProducerRow | None] = {}

    def add(self, call: Call) -> Outcome:
        """Take a call's batches, all or none."""
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
        self._producers[call.producer] = noted(sequence, self._now_us, receipts)
        return receipts

    def write(self) -> set[int]:
        """Write everything. Returns the queues that have grown."""
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
                growth = queues[queue] = _Growth(self._changes.tail(queue))
            # The same as Receipt(SequenceToken(growth.next)) at a third of its cost.
            receipts.append(_tuple(Receipt, (_tuple(SequenceToken, (growth.next, 0)), False)))
            growth.next += 1
            growth.batches.append(batch)
        return receipts


class _Growth:
    """What one queue gains."""

    __slots__ = ("batches", "next", "tail")

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.next = tail.next
        self.batches: list[EventBatch] = []

    def write(self, changes: Changes, encoder: BlockEncoder, queue: int, now_us: int) -> None:
        time_us = max(now_us, self.tail.time_us)
        offset, nbytes = self.tail.next, self.tail.nbytes
        for batches in split(self.batches):
            with encoder.encode(batches, time_us) as record:
                changes.append(queue, offset, record)
                nbytes += len(record)
            offset += len(batches)
        events = self.tail.events + sum(batch.count for batch in self.batches)
        changes.put_tail(queue, self.tail._replace(next=offset, events=events, nbytes=nbytes, time_us=time_us))
