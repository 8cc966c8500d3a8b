"""The common part of the group commits of the adapters `log` and `postgres`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple, Protocol, TypeVar

from ..streams.errors import SequenceConflict
from ..streams.events import EventBatch
from ..streams.identity import SequenceToken
from ..streams.producer_ledger import LastCall
from ..streams.publishing import ProducerSequence, Receipt

MAX_STORED_OFFSETS = 1024
"""The offsets of a producer's last call are stored if there are no more than this."""

Outcome = Sequence[Receipt] | SequenceConflict
"""The receipts of a call, or the error of a call that was not stored."""


class StoredBatches(NamedTuple):
    """Batches of one queue that a commit has stored, at consecutive offsets."""

    first: int
    batches: Sequence[EventBatch]

    @property
    def end(self) -> int:
        """The offset after the last one."""
        return self.first + len(self.batches)

    def copies(self) -> list[EventBatch]:
        """Return new batches with their offsets, which share the encoded bytes."""
        return [
            EventBatch(each.stream, each.encoded, each.count, at) for at, each in enumerate(self.batches, self.first)
        ]


Growth = Mapping[int, StoredBatches]
"""The batches that a commit has added, by queue."""


_tuple: Any = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def receipts_at(offsets: Iterable[int]) -> list[Receipt]:
    """Return `Receipt(SequenceToken(offset))` for each offset. `map` and `zip` halve the cost."""
    tokens = map(_tuple, repeat(SequenceToken), zip(offsets, repeat(0)))
    return list(map(_tuple, repeat(Receipt), zip(tokens, repeat(False))))


def outcome_of_repeated(last: LastCall, sequence: ProducerSequence, batches: int) -> Outcome:
    """Return the outcome of a call that its producer's last call does not accept: a duplicate or a conflict."""
    try:
        return last.answer(sequence, batches)
    except SequenceConflict as conflict:
        return conflict


class _Sized(Protocol):
    nbytes: int


_CallT = TypeVar("_CallT", bound=_Sized)


def groups(calls: Sequence[_CallT], limit: int) -> Iterator[Sequence[_CallT]]:
    """Divide calls into groups. Each ends with the call that makes it reach `limit` bytes."""
    ends = list(accumulate(call.nbytes for call in calls))
    start = taken = 0
    while start < len(calls):
        stop = bisect_left(ends, taken + limit, start) + 1
        yield calls[start:stop]
        start, taken = stop, ends[min(stop, len(ends)) - 1]
