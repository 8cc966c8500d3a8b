"""The rule of idempotent producers: which call is new, which was stored before, and which would leave a hole."""

from __future__ import annotations

from collections.abc import Sequence

from ...streams.errors import InvalidArgument, SequenceConflict
from ...streams.identity import SequenceToken
from ..seam import ProducerSequence, Receipt
from .rows import ProducerRow

MAX_PRODUCER_BYTES = 511
"""Limit of a producer's id, in UTF-8 bytes: LMDB's limit of a key."""
MAX_NUMBER = (1 << 63) - 1
_NOTED_OFFSETS = 1024


def producer_key(sequence: ProducerSequence) -> bytes:
    """Raises InvalidArgument for a sequence that cannot be stored."""
    key = sequence.producer.encode()
    if not 0 < len(key) <= MAX_PRODUCER_BYTES:
        raise InvalidArgument(f"a producer's id has 1 to {MAX_PRODUCER_BYTES} bytes in UTF-8, not {len(key):,}")
    if not 0 <= sequence.previous < sequence.number <= MAX_NUMBER:
        raise InvalidArgument(
            f"producer {sequence.producer!r}: numbers rise from call to call and are at most {MAX_NUMBER}, "
            f"not {sequence.number} after {sequence.previous}"
        )
    return key


def is_duplicate(sequence: ProducerSequence, last: ProducerRow | None) -> bool:
    """Whether the call was stored before; False where it is the next one. Raises SequenceConflict for a hole."""
    stored = last.number if last else 0
    if sequence.number <= stored:
        return True
    if sequence.previous == stored:
        return False
    raise SequenceConflict(
        f"producer {sequence.producer!r}: call {sequence.number} follows call {sequence.previous}, "
        f"but the last one stored is {stored}: publish what is between first"
    )


def duplicate_receipts(sequence: ProducerSequence, last: ProducerRow | None, count: int) -> list[Receipt]:
    """Where the batches of a call that was stored before are; known of the producer's last call only."""
    if last is not None and last.number == sequence.number and len(last.offsets) == count:
        return [Receipt(SequenceToken(offset), duplicate=True) for offset in last.offsets]
    return [Receipt(None, duplicate=True)] * count


def noted(sequence: ProducerSequence, time_us: int, receipts: Sequence[Receipt]) -> ProducerRow:
    """What to remember of a call that is stored now."""
    offsets = [token.offset for token, _ in receipts if token] if len(receipts) <= _NOTED_OFFSETS else []
    return ProducerRow(sequence.number, time_us, offsets)
