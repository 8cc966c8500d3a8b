"""A group of `enqueue` calls that one transaction stores."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Mapping, Sequence

from ...streams.errors import InvalidArgument
from ...streams.events import EventBatch
from ...streams.producer_ledger import LastCall
from ...streams.publishing import check_sequence
from ..group_commit import MAX_STORED_OFFSETS, Outcome, StoredBatches, outcome_of_repeated, receipts_at
from ..seam import ProducerSequence, Receipt
from .blocks import BlockEncoder, BlockPlace, split
from .rows import ProducerRow, TailRow
from .transactions import LogChanges

MAX_PRODUCER_BYTES = 511
"""Limit of a producer's id, in UTF-8 bytes: LMDB's limit of a key."""


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
        self.producer = _producer_key(check_sequence(sequence)) if sequence else b""


class CommitGroup:
    """Collects the batches of calls, then writes them: `add` each call, then `write`."""

    def __init__(self, changes: LogChanges, encoder: BlockEncoder, now_us: int) -> None:
        self._changes = changes
        self._encoder = encoder
        self._now_us = now_us
        self._queues: dict[int, _QueueGrowth] = {}
        self._producers: dict[bytes, LastCall] = {}
        """The last calls of producers that have stored something in this group."""

    def add(self, call: CommitRequest) -> Outcome:
        """Add all batches of a call, or none if it is a duplicate or a conflict. Return its receipts or its error."""
        sequence = call.sequence
        if sequence is None:
            return self._place(call.batches)
        last = self._last(call.producer)
        if not last.accepts(sequence):
            return outcome_of_repeated(last, sequence, len(call.batches))
        receipts = self._place(call.batches)
        self._producers[call.producer] = LastCall(sequence.number, [token.offset for token, _ in receipts if token])
        return receipts

    def write(self) -> Mapping[int, StoredBatches]:
        """Write all batches and producers. Return the new batches of each queue that has grown."""
        for queue, growth in self._queues.items():
            growth.write(self._changes, self._encoder, queue, self._now_us)
        for producer, (number, offsets) in self._producers.items():
            kept = [each for each in offsets if each is not None] if len(offsets) <= MAX_STORED_OFFSETS else []
            self._changes.put_producer(producer, ProducerRow(number, self._now_us, kept))
        return {queue: StoredBatches(grown.tail.next, grown.batches) for queue, grown in self._queues.items()}

    def _last(self, producer: bytes) -> LastCall:
        if producer in self._producers:
            return self._producers[producer]
        row = self._changes.producer(producer)
        return LastCall() if row is None else LastCall(row.number, row.offsets)

    def _place(self, batches: Sequence[tuple[int, EventBatch]]) -> list[Receipt]:
        queues = self._queues
        offsets: list[int] = []
        for queue, batch in batches:
            growth = queues.get(queue)
            if growth is None:
                growth = queues[queue] = _QueueGrowth(self._changes.tail(queue))
            offsets.append(growth.next)
            growth.next += 1
            growth.batches.append(batch)
        return receipts_at(offsets)


class _QueueGrowth:
    """The new batches of one queue."""

    __slots__ = ("batches", "next", "tail")

    def __init__(self, tail: TailRow) -> None:
        self.tail = tail
        self.next = tail.next
        self.batches: list[EventBatch] = []

    def write(self, changes: LogChanges, encoder: BlockEncoder, queue: int, now_us: int) -> None:
        time_us = max(now_us, self.tail.time_us)
        offset, nbytes = self.tail.next, self.tail.nbytes
        for batches in split(self.batches):
            with encoder.encode(BlockPlace(queue, offset), batches, time_us) as record:
                changes.append(queue, offset, record)
                nbytes += len(record)
            offset += len(batches)
        events = self.tail.events + sum(batch.count for batch in self.batches)
        changes.put_tail(queue, self.tail._replace(next=offset, events=events, nbytes=nbytes, time_us=time_us))


def _producer_key(sequence: ProducerSequence) -> bytes:
    """Return the key of a producer's row. Raises InvalidArgument if it cannot be stored."""
    key = sequence.producer.encode()
    if not 0 < len(key) <= MAX_PRODUCER_BYTES:
        raise InvalidArgument(f"a producer's id has 1 to {MAX_PRODUCER_BYTES} bytes in UTF-8, not {len(key):,}")
    return key
