"""The ledger of idempotent producers. It decides if a call is new, was stored before, or would leave a hole. Pure.

The adapters `memory`, `log`, `redis`, `postgres` and `kafka` and the delays decide by it, each with the last calls that
its own storage has.
A script in Redis refuses old numbers again, because other processes store at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .errors import SequenceConflict
from .identity import SequenceToken
from .publishing import ProducerSequence, Receipt


class LastCall(NamedTuple):
    """The last call of a producer that is stored."""

    number: int = 0
    """0: there is none."""
    offsets: Sequence[int | None] = ()
    """The offset of each of its batches, as far as they are known; empty if there are too many to keep."""

    def has(self, sequence: ProducerSequence) -> bool:
        """Return whether the call was stored before."""
        return sequence.number <= self.number

    def accepts(self, sequence: ProducerSequence) -> bool:
        """Return whether the call must be stored: it was not stored before, and no call before it is missing."""
        return sequence.previous == self.number < sequence.number

    def answer(self, sequence: ProducerSequence, batches: int) -> list[Receipt]:
        """Return the receipts of a call of `batches` batches that is not accepted because it was stored before.

        Only receipts of the last call have tokens. Raises SequenceConflict if calls before it are missing.
        """
        if not self.has(sequence):
            raise SequenceConflict(
                f"producer {sequence.producer!r}: call {sequence.number} follows call {sequence.previous}, but the "
                f"last one stored is {self.number}: publish the calls between them first"
            )
        known = sequence.number == self.number and len(self.offsets) == batches
        offsets = self.offsets if known else [None] * batches
        return [Receipt(None if offset is None else SequenceToken(offset), duplicate=True) for offset in offsets]


class ProducerLedger:
    """The last calls of at most `max_producers` producers. Those that stored nothing for the longest time leave first.

    A producer has an id. The id of a caller with an account begins with the account (`owned_id`).
    """

    def __init__(self, max_producers: int) -> None:
        self._max_producers = max_producers
        self._calls: dict[str, LastCall] = {}

    def known(self, producer: str) -> LastCall | None:
        """Return the last call, or None if the ledger does not have the producer."""
        return self._calls.get(producer)

    def last(self, producer: str) -> LastCall:
        """Return the last call. A producer that the ledger does not have is new."""
        return self._calls.get(producer) or LastCall()

    def record(self, producer: str, call: LastCall) -> None:
        """Note that the call is stored."""
        self._calls.pop(producer, None)
        self._calls[producer] = call
        if len(self._calls) > self._max_producers:
            del self._calls[next(iter(self._calls))]


def owned_id(owner: str, producer: str) -> str:
    """Return the id of a producer of an account. No other account can have the same id. "" is the account of callers
    without one: these share their ids."""
    return f"{owner}:{producer}" if owner else producer
