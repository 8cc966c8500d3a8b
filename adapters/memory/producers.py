"""Records which calls of idempotent producers are stored. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ...streams.errors import SequenceConflict
from ..seam import ProducerSequence, Receipt


class ProducerLedger:
    """The last stored call of each producer: one small entry each, kept as long as the adapter is open."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, Sequence[Receipt]]] = {}

    def last(self, producer: str) -> int:
        """Return the highest stored number, 0 if there is none."""
        return self._last[producer][0] if producer in self._last else 0

    def is_new(self, sequence: ProducerSequence) -> bool:
        """Return whether the call must be stored: it is not a duplicate, and no call before it is missing."""
        return sequence.previous == self.last(sequence.producer) < sequence.number

    def record(self, sequence: ProducerSequence, receipts: Sequence[Receipt]) -> None:
        self._last[sequence.producer] = (sequence.number, receipts)

    def answer(self, sequence: ProducerSequence, batches: int) -> Sequence[Receipt]:
        """Return the receipts of a duplicate call, with tokens if it is the last one stored.

        Raises SequenceConflict if it is not a duplicate, but calls before it are missing.
        """
        number, receipts = self._last.get(sequence.producer, (0, ()))
        if sequence.number > number:
            raise SequenceConflict(
                f"producer {sequence.producer!r}: call {sequence.number} follows {sequence.previous}, but the last one "
                f"stored is {number}: publish the calls between them first"
            )
        tokens = [r.token for r in receipts] if sequence.number == number else [None] * batches
        return [Receipt(token, duplicate=True) for token in tokens]
