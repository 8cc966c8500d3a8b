"""The errors that headrace raises. Every one carries a stable `code`; text is for people and may change.

HeadraceError
├── InvalidArgument        bad input: the message says what, where, and what is accepted (also a ValueError)
│   └── PayloadTooLarge    an event or batch above the adapter's limit
├── NotSupported           an option that this adapter or mode cannot honour, refused when it is given
├── NotFound               no such subscription, dead letter, provider or adapter
├── DefinitionConflict     the name exists with another definition
├── Busy                   another live process holds it
├── Fenced                 a newer owner has taken over; what this one still writes is refused
├── QueueFull              bounded capacity reached and the producer chose not to wait (retryable)
├── SequenceConflict       an idempotent producer's earlier batch is missing: send that one first
├── Closed                 used after `aclose`
└── StorageError           the store failed; nothing that was acknowledged is lost (retryable)
    ├── StorageFull        no space left (retryable)
    ├── CorruptRecord      a stored record fails its checksum
    └── DataDirectoryError foreign, damaged or of another version
"""

from __future__ import annotations

from typing import ClassVar


class HeadraceError(Exception):
    """Root of all errors raised by headrace."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False


class InvalidArgument(HeadraceError, ValueError):
    code = "invalid_argument"


class PayloadTooLarge(InvalidArgument):
    """An event or batch is above the limit; checked before anything is stored."""

    code = "payload_too_large"

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"{what} has {size:,} bytes, the limit is {limit:,}: split it, or store it elsewhere and publish where"
        )
        self.size = size
        self.limit = limit


class NotSupported(HeadraceError):
    code = "not_supported"


class NotFound(HeadraceError):
    code = "not_found"


class DefinitionConflict(HeadraceError):
    code = "definition_conflict"


class Busy(HeadraceError):
    code = "busy"


class Fenced(HeadraceError):
    code = "fenced"


class QueueFull(HeadraceError):
    code = "queue_full"
    retryable = True


class SequenceConflict(HeadraceError):
    code = "sequence_conflict"


class Closed(HeadraceError):
    code = "closed"


class StorageError(HeadraceError):
    code = "storage"
    retryable = True


class StorageFull(StorageError):
    code = "storage_full"


class CorruptRecord(StorageError):
    """A stored record is damaged: `queue` cannot be read from `offset` up to `next_offset` (None: not known)."""

    code = "corrupt_record"
    retryable = False

    def __init__(self, queue: int, offset: int, why: str, next_offset: int | None = None) -> None:
        super().__init__(f"queue {queue}, offset {offset}: the stored record is damaged ({why})")
        self.queue = queue
        self.offset = offset
        self.next_offset = next_offset


class DataDirectoryError(StorageError):
    code = "data_directory"
    retryable = False
