"""Conversion of the control store's records to rows, and of rows to records. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import Row

from ..streams.errors import DataDirectoryError, InvalidArgument
from ..streams.identity import SequenceToken, StreamId
from ..streams.subscriptions import (
    Checkpoint,
    DeadLetter,
    GapRecord,
    Selector,
    Start,
    StreamBehind,
    SubscriptionDefinition,
)
from .checksums import check_row, with_checksum
from .schema import MAX_POSITION


class _BehindRow(msgspec.Struct, array_like=True):
    namespace: str
    key: str
    offset: int
    index: int
    paused: str
    done: tuple[tuple[int, int, int], ...] = ()


_behind_decoder = msgspec.json.Decoder(list[_BehindRow])


class _Attributes(msgspec.Struct):
    """The id and headers of an event. Stored as JSON, because text columns of PostgreSQL cannot store every string."""

    id: str | None
    headers: dict[str, str]


def checkpoint_row(queue: int, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the row without subscription and epoch. Raises InvalidArgument for positions above 64 bits."""
    behind = [
        _BehindRow(
            stream.namespace,
            stream.key,
            _position(at.token.offset),
            _position(at.token.index),
            printable(at.paused),
            at.done,
        )
        for stream, at in checkpoint.behind.items()
    ]
    return {
        "queue": _position(queue),
        "next_offset": _position(checkpoint.next_offset),
        "watermark": checkpoint.watermark,
        "behind": msgspec.json.encode(behind).decode() if behind else "[]",
    }


def checkpoint_of(row: Row[Any]) -> Checkpoint:
    """Raises DataDirectoryError for a damaged row."""
    check_row("checkpoints", row)
    if row.behind == "[]":
        return Checkpoint(row.next_offset)
    try:
        behind = _behind_of(_behind_decoder.decode(row.behind))
    except (msgspec.MsgspecError, InvalidArgument) as error:
        raise _damaged("a checkpoint", error) from None
    return Checkpoint(row.next_offset, behind)


def _behind_of(rows: Sequence[_BehindRow]) -> dict[StreamId, StreamBehind]:
    return {
        StreamId(at.namespace, at.key): StreamBehind(SequenceToken(at.offset, at.index), at.paused, at.done)
        for at in rows
    }


class _Position(msgspec.Struct, array_like=True):
    next_offset: int
    behind: list[_BehindRow]


MAX_DONE = 100_000
"""Most events done out of order in a token. A token comes from a client: without this limit, a few bytes of it could
take much memory here."""


def position_token(checkpoint: Checkpoint) -> bytes:
    """Return the token of a checkpoint, for a consumer that keeps its own position. If more than `MAX_DONE` events are
    done out of order, the last ones are left out: they are delivered again."""
    row = checkpoint_row(0, _with_limited_done(checkpoint))
    return b"".join((b"[", str(checkpoint.next_offset).encode(), b",", row["behind"].encode(), b"]"))


def _with_limited_done(checkpoint: Checkpoint) -> Checkpoint:
    behind = {stream: at for stream, at in checkpoint.behind.items() if at.done}
    left = MAX_DONE
    for stream, at in behind.items():
        done: list[tuple[int, int, int]] = []
        for offset, first, last in at.done:
            if (last := min(last, first + left)) > first:
                done.append((offset, first, last))
                left -= last - first
        behind[stream] = at._replace(done=tuple(done))
    return checkpoint._replace(behind={**checkpoint.behind, **behind}) if behind else checkpoint


def checkpoint_of_token(token: bytes) -> Checkpoint:
    """Return the checkpoint of a token. Raises InvalidArgument if `position_token` did not make the token."""
    try:
        position = msgspec.json.decode(token, type=_Position)
        checkpoint = Checkpoint(position.next_offset, _behind_of(position.behind))
        checkpoint_row(0, checkpoint)
        _check_done(checkpoint)
    except (msgspec.MsgspecError, InvalidArgument) as error:
        raise InvalidArgument(f"the token is no position that a silo gave: {error}") from None
    return checkpoint


def _check_done(checkpoint: Checkpoint) -> None:
    ranges = [each for at in checkpoint.behind.values() for each in at.done]
    for offset, first, last in ranges:
        if not (_position(offset) == offset and 0 <= first < last):
            raise InvalidArgument(f"events {first} to {last} of a batch are none")
    if sum(last - first for _, first, last in ranges) > MAX_DONE:
        raise InvalidArgument(f"more than {MAX_DONE:,} events are done out of order")


def definition_text(definition: SubscriptionDefinition) -> str:
    return msgspec.json.encode(definition).decode()


def definition_of(text: str) -> SubscriptionDefinition:
    try:
        return msgspec.json.decode(text, type=SubscriptionDefinition)
    except msgspec.MsgspecError as error:
        raise _damaged("a subscription", error) from None


def differences(stored: SubscriptionDefinition, wanted: SubscriptionDefinition) -> str:
    """Describe, for people, the fields in which two definitions differ, with both values."""
    pairs = [(field, getattr(stored, field), getattr(wanted, field)) for field in stored.__struct_fields__]
    return "; ".join(f"{field} is {_shown(a)}, not {_shown(b)}" for field, a, b in pairs if a != b)


def dead_letter_row(letter: DeadLetter) -> dict[str, Any]:
    """Return the row without an id. Raises InvalidArgument for positions above 64 bits."""
    row = {
        "provider": letter.provider,
        "subscription": letter.subscription,
        "queue": _position(letter.queue),
        "token_offset": _position(letter.token.offset),
        "token_index": _position(letter.token.index),
        "stream": str(letter.stream),
        "payload": letter.payload,
        "attributes": msgspec.json.encode(_Attributes(letter.event_id, dict(letter.headers))).decode(),
        "timestamp_us": letter.timestamp_us,
        "reason": printable(letter.reason),
        "attempts": letter.attempts,
        "failed_at_us": letter.failed_at_us,
        "redrive": letter.redrive,
    }
    return with_checksum("dead_letters", row)


def dead_letter_of(row: Row[Any]) -> DeadLetter:
    """Raises DataDirectoryError for a damaged row."""
    check_row("dead_letters", row)
    try:
        attributes = msgspec.json.decode(row.attributes, type=_Attributes)
        stream = StreamId.parse(row.stream)
    except (msgspec.MsgspecError, InvalidArgument) as error:
        raise _damaged(f"dead letter {row.id}", error) from None
    return DeadLetter(
        id=row.id,
        provider=row.provider,
        subscription=row.subscription,
        queue=row.queue,
        stream=stream,
        token=SequenceToken(row.token_offset, row.token_index),
        payload=row.payload,
        headers=attributes.headers,
        event_id=attributes.id,
        timestamp_us=row.timestamp_us,
        reason=row.reason,
        attempts=row.attempts,
        failed_at_us=row.failed_at_us,
        redrive=row.redrive,
    )


def gap_row(gap: GapRecord) -> dict[str, Any]:
    """Return the row of a gap record. Raises InvalidArgument for positions above 64 bits."""
    return {
        "provider": gap.provider,
        "subscription": gap.subscription,
        "queue": _position(gap.queue),
        "stream": "" if gap.stream is None else str(gap.stream),
        "low_offset": _position(gap.low.offset),
        "low_index": _position(gap.low.index),
        "high_offset": _position(gap.high.offset),
        "high_index": _position(gap.high.index),
        "reason": printable(gap.reason),
        "at_us": gap.at_us,
    }


def gap_of(row: Row[Any]) -> GapRecord:
    try:
        stream = StreamId.parse(row.stream) if row.stream else None
    except InvalidArgument as error:
        raise _damaged("a gap record", error) from None
    return GapRecord(
        provider=row.provider,
        subscription=row.subscription,
        queue=row.queue,
        stream=stream,
        low=SequenceToken(row.low_offset, row.low_index),
        high=SequenceToken(row.high_offset, row.high_index),
        reason=row.reason,
        at_us=row.at_us,
    )


def printable(text: str) -> str:
    """Return text that every database can store: lone surrogates and NUL become escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def plain(value: Mapping[int, Checkpoint]) -> dict[int, Checkpoint]:
    """Return a copy, which does not change when the caller changes the original."""
    return {queue: Checkpoint(at.next_offset, dict(at.behind)) for queue, at in value.items()}


def _position(value: int) -> int:
    if 0 <= value <= MAX_POSITION:
        return value
    raise InvalidArgument(f"the control store holds positions from 0 to {MAX_POSITION}, not {value}")


def _shown(value: object) -> str:
    """Return a part of a definition as a user writes it."""
    match value:
        case Selector():
            return value.pattern
        case Start(time_us=int(time_us)):
            try:
                return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)).isoformat()
            except OverflowError:  # outside of the years of datetime
                return f"{time_us:,} microseconds from 1970 on"
        case Start():
            return value.token or value.kind.value
        case _:
            return msgspec.json.encode(value).decode()


def _damaged(what: str, error: Exception) -> DataDirectoryError:
    return DataDirectoryError(f"{what} in the control store is damaged ({error}); restore it from a copy")
