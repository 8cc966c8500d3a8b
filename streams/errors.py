"""The errors that headrace raises. Each has a stable `code`; its text is for people and may change.

`status` is the number of its gRPC status. Over gRPC the code is sent, too, so a client raises the same class as the
silo (`error_of`).

HeadraceError
├── InvalidArgument        bad input: the message names the input and the accepted values (also a ValueError)
│   ├── PayloadTooLarge    an event or batch above the adapter's limit
│   └── PayloadInvalid     a payload cannot be encoded or decoded; raised by a handler: the event is given up on
├── NotSupported           an option that this adapter or mode cannot honour, refused when it is given
├── NotFound               no such subscription, dead letter, provider or adapter
├── DefinitionConflict     the name exists with another definition
├── Busy                   another live process holds it
├── Fenced                 a newer owner has taken over; writes of this one are refused
├── QueueFull              bounded capacity reached and the producer chose not to wait (retryable)
├── SequenceConflict       an idempotent producer's earlier batch is missing: send that one first
├── Unauthenticated        no token, or an unknown one
├── PermissionDenied       the token does not allow it
├── LimitExceeded          more than one client may use: connections, requests, bytes (retryable)
├── Unavailable            the silo cannot be reached, or stops (retryable); raised by a handler: its dependency is down
├── Closed                 used after `aclose`
└── StorageError           the store failed; nothing that was acknowledged is lost (retryable)
    ├── StorageFull        no space left (retryable)
    ├── CorruptRecord      a stored record fails its checksum
    └── DataDirectoryError foreign, damaged or of another version
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Self

_OPTION_IN_HINT = re.compile(r"\{([\w.]+)\}")


class HeadraceError(Exception):
    """Root of all errors raised by headrace. Its text is `option: problem: hint`; option and hint may be missing.
    `problem` may be the exception that is the cause: its text is taken, or the name of its type if it has no text.
    Further arguments, as other exceptions have them, are added to its text.

    A silo sends only the text, so an error from a silo has no `option` and no `hint`.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 13  # INTERNAL
    retryable: ClassVar[bool] = False

    option: str = ""
    """The option that the error is about, by its name in Python, such as `tls.ca`; empty for none."""
    hint: str = ""
    """What to do. An option in it is written in braces, such as `{tls.ca}`."""
    problem: str = ""
    """The text without `option` and `hint`."""

    def __init__(self, problem: str | BaseException = "", *more: object, option: str = "", hint: str = "") -> None:
        self.option, self.hint = _as_text(option), _as_text(hint)
        self.problem = ", ".join(map(_as_text, (problem, *more)))
        super().__init__(_text(self.option, self.problem, self.hint))

    def text_for(self, options: Mapping[str, str]) -> str:
        """Return the text with other names of options: `options` maps each name in Python to the name to show."""
        if not self.option and not self.hint:
            return str(self)
        hint = _OPTION_IN_HINT.sub(lambda match: options.get(match[1], match[1]), self.hint)
        return _text(options.get(self.option, self.option), self.problem, hint)

    def copy(self) -> Self:
        """Return an equal error, so that it can be raised to another caller."""
        copy = type(self).__new__(type(self), *self.args)
        copy.__dict__.update(self.__dict__)
        return copy


def _as_text(value: object) -> str:
    """Return the text of an argument. Never raises: `raise Unavailable(error)` must stay an `Unavailable`."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return str(value) or type(value).__name__
    except Exception:  # noqa: BLE001 (`str` of it runs foreign code)
        return type(value).__name__


def _text(option: str, problem: str, hint: str) -> str:
    return ": ".join(filter(None, (option, problem, _OPTION_IN_HINT.sub(r"\1", hint))))


class InvalidArgument(HeadraceError, ValueError):
    """The input is wrong. The message names the input and the accepted values."""

    code = "invalid_argument"
    status = 3  # INVALID_ARGUMENT


class PayloadTooLarge(InvalidArgument):
    """An event or batch is above the limit; checked before anything is stored."""

    code = "payload_too_large"

    def __init__(
        self, what: str, size: int, limit: int, remedy: str = "split it, or store it elsewhere and publish where"
    ) -> None:
        super().__init__(f"{what} has {size:,} bytes, the limit is {limit:,}: {remedy}")
        self.size: int | None = size
        """`size` and `limit` are None if a silo raised the error; its message has them."""
        self.limit: int | None = limit


class PayloadInvalid(InvalidArgument):
    """A payload cannot be encoded, or is not of the type that its handler takes. A handler that raises it is not tried
    again with this event: what `on_failure` says happens at once."""

    code = "payload_invalid"


class NotSupported(HeadraceError):
    """The adapter or the mode cannot honour an option. It is refused when it is given."""

    code = "not_supported"
    status = 9  # FAILED_PRECONDITION


class NotFound(HeadraceError):
    """There is no such subscription, dead letter, provider or adapter."""

    code = "not_found"
    status = 5  # NOT_FOUND


class DefinitionConflict(HeadraceError):
    """The name exists with another definition."""

    code = "definition_conflict"
    status = 6  # ALREADY_EXISTS


class Busy(HeadraceError):
    """Another live process holds the subscription or the name."""

    code = "busy"
    status = 9  # FAILED_PRECONDITION


class Fenced(HeadraceError):
    """A newer owner has taken over. Writes of this one are refused."""

    code = "fenced"
    status = 10  # ABORTED


class QueueFull(HeadraceError):
    """A queue has reached its capacity, and the producer chose not to wait."""

    code = "queue_full"
    status = 8  # RESOURCE_EXHAUSTED
    retryable = True


class SequenceConflict(HeadraceError):
    """An earlier batch of an idempotent producer is missing: send that one first."""

    code = "sequence_conflict"
    status = 9  # FAILED_PRECONDITION


class Unauthenticated(HeadraceError):
    """The call has no token, or an unknown one."""

    code = "unauthenticated"
    status = 16  # UNAUTHENTICATED


class PermissionDenied(HeadraceError):
    """The token does not allow the call."""

    code = "permission_denied"
    status = 7  # PERMISSION_DENIED


class LimitExceeded(HeadraceError):
    """The client has used up its connections, requests or bytes. Try again later."""

    code = "limit_exceeded"
    status = 8  # RESOURCE_EXHAUSTED
    retryable = True


class Unavailable(HeadraceError):
    """The silo cannot be reached, or stops. A handler may raise it if a dependency is down: the attempt then does not
    count, and the event is tried again until it succeeds."""

    code = "unavailable"
    status = 14  # UNAVAILABLE
    retryable = True


class Closed(HeadraceError):
    """The object was used after `aclose`."""

    code = "closed"
    status = 14  # UNAVAILABLE


class StorageError(HeadraceError):
    """The store failed. Nothing that was acknowledged is lost."""

    code = "storage"
    status = 14  # UNAVAILABLE
    retryable = True


class StorageFull(StorageError):
    """There is no space left."""

    code = "storage_full"
    status = 8  # RESOURCE_EXHAUSTED


class CorruptRecord(StorageError):
    """A stored record is damaged: `queue` cannot be read from `offset` up to `next_offset` (exclusive; None if
    unknown)."""

    code = "corrupt_record"
    status = 15  # DATA_LOSS
    retryable = False

    def __init__(self, queue: int, offset: int, why: str, next_offset: int | None = None, remedy: str = "") -> None:
        """`remedy` is the command that skips the record."""
        last = offset if next_offset is None else next_offset - 1
        where = f"offset {offset}" if last <= offset else f"offsets {offset} to {last}"
        way = f": skip it with {remedy}" if remedy else ""
        super().__init__(f"queue {queue}, {where}: the stored record is damaged ({why}){way}")
        self.queue: int | None = queue
        """`queue` and `offset` are None if the error is from a silo; its message has them."""
        self.offset: int | None = offset
        self.next_offset = next_offset


class OffsetsGone(HeadraceError):
    """Retention has deleted the events of `queue` from `start` on; `first` is the first offset that is left."""

    code = "offsets_gone"
    status = 11  # OUT_OF_RANGE

    def __init__(self, queue: int, start: int, first: int) -> None:
        super().__init__(f"queue {queue}: offsets {start} to {first - 1} are gone, removed by retention")
        self.queue: int | None = queue
        """`queue`, `start` and `first` are None if the error is from a silo; its message has them."""
        self.start: int | None = start
        self.first: int | None = first


class DataDirectoryError(StorageError):
    """The data directory is foreign, damaged, or of another version."""

    code = "data_directory"
    status = 9  # FAILED_PRECONDITION
    retryable = False


def error_of(code: str, message: str) -> HeadraceError | None:
    """Return the error that a silo raised, from its code and text; None if this version does not know the code."""
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


def code_of(error: BaseException) -> str:
    """Return the code under which an error is counted: `internal` if it is no HeadraceError."""
    return error.code if isinstance(error, HeadraceError) else HeadraceError.code
