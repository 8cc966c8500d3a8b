"""Which calls of which idempotent producers are stored. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ...streams.errors import SequenceConflict
from ..seam import ProducerSequence, Receipt


class ProducerLedger:
    """The last stored call of each producer, kept as long as the adapter is open: one small entry each."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, Sequence[Receipt]]] = {}

    def last(self, producer: str) -> int:
        """The highest number stored, 0 where there is none."""
        return self._last[producer][0] if producer in self._last else 0

    def is_new(self, sequence: ProducerSequence) -> bool:
        """Whether the call is to be stored: neither a duplicate nor one with a hole before it."""
        return sequence.previous == self.last(sequence.producer) < sequence.number

    def record(self, sequence: ProducerSequence, receipts: Sequence[Receipt]) -> None:
        self._last[sequence.producer] = (sequence.number, receipts)

    def answer(self, sequence: ProducerSequence, batches: int) -> Sequence[Receipt]:
        """The receipts of a duplicate call, with tokens where it is the last one stored.

        Raises SequenceConflict where the call is no duplicate but leaves a hole.
        """
        number, receipts = self._last.get(sequence.producer, (0, ()))
        if sequence.number > number:
            raise SequenceConflict(
                f"producer {sequence.producer!r}: call {sequence.number} follows {sequence.previous}, but the last one "
                f"stored is {number}: send those in between first"
            )
        tokens = [r.token for r in receipts] if sequence.number == number else [None] * batches
        return [Receipt(token, duplicate=True) for token in tokens]
