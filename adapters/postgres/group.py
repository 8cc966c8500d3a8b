"""A group of `enqueue` calls that one transaction stores."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Iterator, Mapping, Sequence
from struct import Struct
from typing import NamedTuple

from ...streams.events import EventBatch
from ...streams.producer_ledger import LastCall
from ...streams.publishing import ProducerSequence, Receipt, check_sequence
from ..group_commit import MAX_STORED_OFFSETS, Outcome, StoredBatches, outcome_of_repeated, receipts_at
from ..log.blocks import BlockEncoder, BlockPlace, split

CHUNK_BYTES = 8000
"""Largest chunk: with the other columns, it fills a page of 8 KiB."""


class WaitingCall:
    """A call of `enqueue` that waits for a commit, and the future that its caller awaits."""

    __slots__ = ("answer", "batches", "deadline", "nbytes", "producer", "queues", "sequence")

    def __init__(
        self,
        batches: Sequence[tuple[int, EventBatch]],
        nbytes: int,
        answer: Future[Sequence[Receipt]],
        sequence: ProducerSequence | None,
        deadline: float,
    ) -> None:
        """`deadline` is a time of the monotonic clock. Raises InvalidArgument for a wrong sequence."""
        self.batches = batches
        self.queues = {queue for queue, _ in batches}
        self.nbytes = nbytes
        self.answer = answer
        self.sequence = sequence
        self.producer = check_sequence(sequence).producer.encode() if sequence else b""
        self.deadline = deadline


class LockedTail(NamedTuple):
    """The end of a queue, as its row has it."""

    segment: int
    next: int
    events: int
    nbytes: int
    time_us: int


class ChunkRow(NamedTuple):
    """A row of a segment."""

    queue: int
    first: int
    part: int
    parts: int
    batches: int
    events: int
    """Events of the whole block in its part 0, and 0 in the others: their sum is that of all events."""
    time_us: int
    chunk: bytes


class CommittedBatches(NamedTuple):
    """Batches of one queue that a commit has stored."""

    stored: StoredBatches
    before_us: int
    """Commit time of the block before them, 0 if there is none."""
    time_us: int
    """Their own commit time."""


CommittedGrowth = Mapping[int, CommittedBatches]
"""The batches that a commit has added, by queue."""


class GroupWrites(NamedTuple):
    """The writes of one transaction."""

    rows: Mapping[int, Sequence[ChunkRow]]
    """By segment."""
    tails: Mapping[int, LockedTail]
    """The new end of each queue that grows."""
    producers: Mapping[bytes, LastCall]
    grown: CommittedGrowth
    now_us: int

    def nbytes(self) -> int:
        return sum(len(row.chunk) for rows in self.rows.values() for row in rows)


class EnqueueGroup:
    """Collects the batches of calls, in the queues whose rows are locked: `add` each call, then take the `writes`."""

    def __init__(self, tails: Mapping[int, LockedTail], producers: Mapping[bytes, LastCall], now_us: int) -> None:
        self._tails = tails
        self._producers = dict(producers)
        self._stored: dict[bytes, LastCall] = {}
        self._grown: dict[int, list[EventBatch]] = {}
        self._now_us = now_us

    def add(self, call: WaitingCall) -> Outcome:
        """Add all batches of a call, or none if it is a duplicate or a conflict. Return its receipts or its error."""
        sequence = call.sequence
        if sequence is None:
            return self._place(call.batches)
        last = self._producers.get(call.producer) or LastCall()
        if not last.accepts(sequence):
            return outcome_of_repeated(last, sequence, len(call.batches))
        receipts = self._place(call.batches)
        stored = LastCall(sequence.number, [token.offset for token, _ in receipts if token])
        self._producers[call.producer] = self._stored[call.producer] = stored
        return receipts

    def _place(self, batches: Sequence[tuple[int, EventBatch]]) -> list[Receipt]:
        offsets: list[int] = []
        for queue, batch in batches:
            grown = self._grown.get(queue)
            if grown is None:
                grown = self._grown[queue] = []
            offsets.append(self._tails[queue].next + len(grown))
            grown.append(batch)
        return receipts_at(offsets)

    def writes(self, encoder: BlockEncoder) -> GroupWrites:
        """Encode the batches, and return everything to write."""
        rows: dict[int, list[ChunkRow]] = {}
        tails: dict[int, LockedTail] = {}
        grown: dict[int, CommittedBatches] = {}
        for queue, batches in self._grown.items():
            tail = self._tails[queue]
            time_us = max(self._now_us, tail.time_us + 1)  # never the same: the time identifies a block
            chunks = list(_chunks(encoder, queue, tail.next, batches, time_us))
            rows.setdefault(tail.segment, []).extend(chunks)
            tails[queue] = LockedTail(
                tail.segment,
                tail.next + len(batches),
                tail.events + sum(row.events for row in chunks),
                tail.nbytes + sum(len(row.chunk) for row in chunks),
                time_us,
            )
            grown[queue] = CommittedBatches(StoredBatches(tail.next, batches), tail.time_us, time_us)
        producers = {
            producer: LastCall(number, offsets if len(offsets) <= MAX_STORED_OFFSETS else ())
            for producer, (number, offsets) in self._stored.items()
        }
        return GroupWrites(rows, tails, producers, grown, self._now_us)


def _chunks(
    encoder: BlockEncoder, queue: int, offset: int, batches: Sequence[EventBatch], time_us: int
) -> Iterator[ChunkRow]:
    for block in split(batches):
        with encoder.encode(BlockPlace(queue, offset), block, time_us) as record:
            starts = range(0, len(record), CHUNK_BYTES)
            events = sum(batch.count for batch in block)
            for part, start in enumerate(starts):
                chunk = bytes(record[start : start + CHUNK_BYTES])
                yield ChunkRow(queue, offset, part, len(starts), len(block), events if not part else 0, time_us, chunk)
        offset += len(block)


_COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END = b"\xff\xff"
_COPY_ROW = Struct(">hiiiqiiiiiiiiiqi")


def copy_binary(rows: Sequence[ChunkRow]) -> bytes:
    """Return the rows in the binary format of `COPY`."""
    pack = _COPY_ROW.pack
    encoded = [
        piece
        for queue, first, part, parts, batches, events, time_us, chunk in rows
        for piece in (
            pack(8, 4, queue, 8, first, 4, part, 4, parts, 4, batches, 4, events, 8, time_us, len(chunk)),
            chunk,
        )
    ]
    return b"".join((_COPY_HEADER, *encoded, _COPY_END))


def literals(rows: Sequence[ChunkRow]) -> str:
    """Return the rows as SQL, for `VALUES`. They have numbers and hexadecimal digits only."""
    return ", ".join(f"({', '.join(map(str, row[:-1]))}, {bytea(row.chunk)})" for row in rows)


def bytea(value: bytes) -> str:
    """Return bytes as SQL, without backslashes: `standard_conforming_strings = off` gives them another meaning."""
    return f"decode('{value.hex()}', 'hex')"
