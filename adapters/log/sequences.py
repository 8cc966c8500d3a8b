"""The rule of idempotent producers: decides if a call is new, was stored before, or would leave a hole."""

from __future__ import annotations

from collections.abc import Sequence

from ...streams.errors import InvalidArgument, SequenceConflict
from ...streams.identity import SequenceToken
from ..seam import ProducerSequence, Receipt
from .rows import ProducerRow

MAX_PRODUCER_BYTES = 511
"""Limit of a producer's id, in UTF-8 bytes: LMDB's limit of a key."""
MAX_NUMBER = (1 << 63) - 1
_MAX_STORED_OFFSETS = 1024


def producer_key(sequence: ProducerSequence) -> bytes:
    """Return the key of a producer's row. Raises InvalidArgument if the sequence cannot be stored."""
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
    """Return whether the call was stored before. Raises SequenceConflict if calls before it are missing."""
    stored = last.number if last else 0
    if sequence.number <= stored:
        return True
    if sequence.previous == stored:
        return False
    raise SequenceConflict(
        f"producer {sequence.producer!r}: call {sequence.number} follows call {sequence.previous}, "
        f"but the last one stored is {stored}: publish the calls between them first"
    )


def duplicate_receipts(sequence: ProducerSequence, last: ProducerRow | None, count: int) -> list[Receipt]:
    """Return the receipts of a call that was stored before. Only those of the producer's last call have tokens."""
    if last is not None and last.number == sequence.number and len(last.offsets) == count:
        return [Receipt(SequenceToken(offset), duplicate=True) for offset in last.offsets]
    return [Receipt(None, duplicate=True)] * count


def producer_row(sequence: ProducerSequence, time_us: int, receipts: Sequence[Receipt]) -> ProducerRow:
    """Return the row that records a call that is stored now."""
    offsets = [token.offset for token, _ in receipts if token] if len(receipts) <= _MAX_STORED_OFFSETS else []
    return ProducerRow(sequence.number, time_us, offsets)
