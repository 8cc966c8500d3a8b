"""Convert records of the library to messages of `headrace.v1`, and back. Pure; server and client both use it.

In a message, a missing field or an unspecified enum means the record's default. A value that no record can have raises
InvalidArgument with the path of the field, as in "definition.retry: ...". Importing this module imports the generated
code: import it only when it is used.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from ..proto.v1 import subscriptions_pb2 as pb
from .errors import InvalidArgument
from .identity import SequenceToken, StreamId
from .subscriptions import (
    DeadLetter,
    GapRecord,
    Mode,
    OnFailure,
    RetryPolicy,
    Selector,
    SlowConsumer,
    Start,
    StartKind,
    SubscriptionDefinition,
)

_T = TypeVar("_T")
_N = TypeVar("_N", bound=int)

# Unspecified values come first, so the inverse dict has the explicit number.
_MODES = {
    pb.MODE_UNSPECIFIED: Mode.SHARED,
    pb.MODE_SHARED: Mode.SHARED,
    pb.MODE_BOUND: Mode.BOUND,
    pb.MODE_BROADCAST: Mode.BROADCAST,
}
_ON_FAILURE = {
    pb.ON_FAILURE_UNSPECIFIED: OnFailure.DEAD_LETTER,
    pb.ON_FAILURE_DEAD_LETTER: OnFailure.DEAD_LETTER,
    pb.ON_FAILURE_SKIP: OnFailure.SKIP,
    pb.ON_FAILURE_PAUSE: OnFailure.PAUSE,
}
_SLOW_CONSUMER = {
    pb.SLOW_CONSUMER_UNSPECIFIED: None,
    pb.SLOW_CONSUMER_THROTTLE: SlowConsumer.THROTTLE,
    pb.SLOW_CONSUMER_DETACH: SlowConsumer.DETACH,
}
_MODE_NUMBER = {mode: number for number, mode in _MODES.items()}
_ON_FAILURE_NUMBER = {policy: number for number, policy in _ON_FAILURE.items()}
_SLOW_CONSUMER_NUMBER = {policy: number for number, policy in _SLOW_CONSUMER.items()}


# ---- definitions -----------------------------------------------------------------------------------------------------


def definition_message(definition: SubscriptionDefinition) -> pb.SubscriptionDefinition:
    """Include every field, also those with the default value."""
    retry = definition.retry
    return pb.SubscriptionDefinition(
        name=definition.name,
        selector=definition.selector.pattern,
        start=start_message(definition.start),
        retry=pb.RetryPolicy(**{field: getattr(retry, field) for field in retry.__struct_fields__}),
        on_failure=_ON_FAILURE_NUMBER[definition.on_failure],
        slow_consumer=_SLOW_CONSUMER_NUMBER[definition.slow_consumer],
        mode=_MODE_NUMBER[definition.mode],
        filter=definition.filter or "",
        circuit_breaker=definition.circuit_breaker,
    )


def definition_of(message: pb.SubscriptionDefinition, path: str = "definition") -> SubscriptionDefinition:
    with _at(f"{path}.selector"):
        selector = Selector(message.selector)
    start = start_of(message.start, f"{path}.start")
    retry = _retry_of(message.retry, f"{path}.retry")
    on_failure = _known(_ON_FAILURE, message.on_failure, f"{path}.on_failure")
    slow_consumer = _known(_SLOW_CONSUMER, message.slow_consumer, f"{path}.slow_consumer")
    mode = _known(_MODES, message.mode, f"{path}.mode")
    with _at(path):
        return SubscriptionDefinition(
            name=message.name,
            selector=selector,
            start=start,
            retry=retry,
            on_failure=on_failure,
            slow_consumer=slow_consumer,
            mode=mode,
            filter=message.filter or None,
            circuit_breaker=message.circuit_breaker or not message.HasField("circuit_breaker"),
        )


def start_message(start: Start) -> pb.Start:
    if start.kind is StartKind.OFFSETS:
        return pb.Start(token=start.token or "")
    if start.kind is StartKind.TIME:
        return pb.Start(time_us=start.time_us or 0)
    return pb.Start(earliest=True) if start.kind is StartKind.EARLIEST else pb.Start(latest=True)


def start_of(message: pb.Start, path: str = "start") -> Start:
    given = message.WhichOneof("position")
    if given == "token":
        with _at(f"{path}.token"):
            return Start(kind=StartKind.OFFSETS, token=message.token)
    if given == "time_us":
        with _at(f"{path}.time_us"):
            return Start(kind=StartKind.TIME, time_us=message.time_us)
    if given is not None and not getattr(message, given):
        raise InvalidArgument(f"{path}.{given} is true or left out, not false")
    return Start.earliest() if given == "earliest" else Start.latest()


def _retry_of(message: pb.RetryPolicy, path: str) -> RetryPolicy:
    given = {field.name: value for field, value in message.ListFields()}
    with _at(path):
        return RetryPolicy(**given)


def _known(kinds: Mapping[_N, _T], number: _N, path: str) -> _T:
    if number not in kinds:
        raise InvalidArgument(f"{path}: {number} is none of the known values {', '.join(map(str, sorted(kinds)))}")
    return kinds[number]


@contextmanager
def _at(path: str) -> Generator[None]:
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None


# ---- what subscriptions leave behind ---------------------------------------------------------------------------------


def dead_letter_message(letter: DeadLetter) -> pb.DeadLetter:
    """Leave out the provider, which the caller knows."""
    return pb.DeadLetter(
        id=letter.id,
        subscription=letter.subscription,
        queue=letter.queue,
        offset=letter.token.offset,
        index=letter.token.index,
        namespace=letter.stream.namespace,
        key=letter.stream.key,
        payload=letter.payload,
        headers=letter.headers,
        event_id=letter.event_id or "",
        timestamp_us=letter.timestamp_us,
        reason=letter.reason,
        attempts=letter.attempts,
        failed_at_us=letter.failed_at_us,
        redrive=letter.redrive,
    )


def dead_letter_of(message: pb.DeadLetter, provider: str) -> DeadLetter:
    return DeadLetter(
        id=message.id,
        provider=provider,
        subscription=message.subscription,
        queue=message.queue,
        stream=StreamId(message.namespace, message.key),
        token=SequenceToken(message.offset, message.index),
        payload=message.payload,
        headers=dict(message.headers),
        event_id=message.event_id or None,
        timestamp_us=message.timestamp_us,
        reason=message.reason,
        attempts=message.attempts,
        failed_at_us=message.failed_at_us,
        redrive=message.redrive,
    )


def gap_message(gap: GapRecord) -> pb.Gap:
    """Leave out provider and subscription, which the caller knows."""
    stream = gap.stream and pb.StreamName(namespace=gap.stream.namespace, key=gap.stream.key)
    return pb.Gap(
        queue=gap.queue,
        low_offset=gap.low.offset,
        low_index=gap.low.index,
        high_offset=gap.high.offset,
        high_index=gap.high.index,
        stream=stream or None,
        reason=gap.reason,
        at_us=gap.at_us,
    )


def gap_of(message: pb.Gap, provider: str, subscription: str) -> GapRecord:
    named = message.HasField("stream")
    return GapRecord(
        provider=provider,
        subscription=subscription,
        queue=message.queue,
        stream=StreamId(message.stream.namespace, message.stream.key) if named else None,
        low=SequenceToken(message.low_offset, message.low_index),
        high=SequenceToken(message.high_offset, message.high_index),
        reason=message.reason,
        at_us=message.at_us,
    )
