"""The errors that headrace raises. Every one carries a stable `code`; text is for people and may change.

`status` is the number of the gRPC status that tells of it. A remote call carries the code, too, so a client raises the
class that the silo raised (`error_of`).

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
├── Unauthenticated        no token, or one that nobody issued
├── PermissionDenied       the token does not allow it
├── LimitExceeded          more than one client may use: connections, requests, bytes (retryable)
├── Unavailable            the silo cannot be reached, or stops (retryable)
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
    status: ClassVar[int] = 13  # INTERNAL
    retryable: ClassVar[bool] = False


class InvalidArgument(HeadraceError, ValueError):
    code = "invalid_argument"
    status = 3  # INVALID_ARGUMENT


class PayloadTooLarge(InvalidArgument):
    """An event or batch is above the limit; checked before anything is stored."""

    code = "payload_too_large"

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"{what} has {size:,} bytes, the limit is {limit:,}: split it, or store it elsewhere and publish where"
        )
        self.size: int | None = size
        """None, as `limit`, where a silo refused it: the message says them."""
        self.limit: int | None = limit


class NotSupported(HeadraceError):
    code = "not_supported"
    status = 9  # FAILED_PRECONDITION


class NotFound(HeadraceError):
    code = "not_found"
    status = 5  # NOT_FOUND


class DefinitionConflict(HeadraceError):
    code = "definition_conflict"
    status = 6  # ALREADY_EXISTS


class Busy(HeadraceError):
    code = "busy"
    status = 9  # FAILED_PRECONDITION


class Fenced(HeadraceError):
    code = "fenced"
    status = 10  # ABORTED


class QueueFull(HeadraceError):
    code = "queue_full"
    status = 8  # RESOURCE_EXHAUSTED
    retryable = True


class SequenceConflict(HeadraceError):
    code = "sequence_conflict"
    status = 9  # FAILED_PRECONDITION


class Unauthenticated(HeadraceError):
    code = "unauthenticated"
    status = 16  # UNAUTHENTICATED


class PermissionDenied(HeadraceError):
    code = "permission_denied"
    status = 7  # PERMISSION_DENIED


class LimitExceeded(HeadraceError):
    code = "limit_exceeded"
    status = 8  # RESOURCE_EXHAUSTED
    retryable = True


class Unavailable(HeadraceError):
    code = "unavailable"
    status = 14  # UNAVAILABLE
    retryable = True


class Closed(HeadraceError):
    code = "closed"
    status = 14  # UNAVAILABLE


class StorageError(HeadraceError):
    code = "storage"
    status = 14  # UNAVAILABLE
    retryable = True


class StorageFull(StorageError):
    code = "storage_full"
    status = 8  # RESOURCE_EXHAUSTED


class CorruptRecord(StorageError):
    """A stored record is damaged: `queue` cannot be read from `offset` up to `next_offset` (None: not known)."""

    code = "corrupt_record"
    status = 15  # DATA_LOSS
    retryable = False

    def __init__(self, queue: int, offset: int, why: str, next_offset: int | None = None) -> None:
        super().__init__(f"queue {queue}, offset {offset}: the stored record is damaged ({why})")
        self.queue: int | None = queue
        """None, as `offset`, where a silo told of it: the message says them."""
        self.offset: int | None = offset
        self.next_offset = next_offset


class OffsetsGone(HeadraceError):
    """What is to be read of `queue` from `start` on was deleted up to `first`, the first offset that is left."""

    code = "offsets_gone"
    status = 11  # OUT_OF_RANGE

    def __init__(self, queue: int, start: int, first: int) -> None:
        super().__init__(f"queue {queue}: offsets {start} to {first - 1} are gone, removed by retention")
        self.queue: int | None = queue
        """None, as `start` and `first`, where a silo told of it: the message says them."""
        self.start: int | None = start
        self.first: int | None = first


class DataDirectoryError(StorageError):
    code = "data_directory"
    status = 9  # FAILED_PRECONDITION
    retryable = False


def error_of(code: str, message: str) -> HeadraceError | None:
    """The error that a silo raised, from its code and text; None for a code that this version does not know."""
    kind = _BY_CODE.get(code)
    if kind is None:
        return None
    error = kind.__new__(kind)
    error.args = (message,)
    for name in _UNKNOWN.get(kind, ()):
        setattr(error, name, None)
    return error


_UNKNOWN: dict[type[HeadraceError], tuple[str, ...]] = {
    PayloadTooLarge: ("size", "limit"),
    CorruptRecord: ("queue", "offset", "next_offset"),
    OffsetsGone: ("queue", "start", "first"),
}


def _tree(kind: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _tree(child))]


_BY_CODE = {kind.code: kind for kind in _tree(HeadraceError)}
