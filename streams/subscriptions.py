"""Subscriptions: durable, named interest in streams, and their stored progress.

A subscription is a definition (selector, start, failure policy) plus a checkpoint per queue. Decisions are pure
functions here; the control store keeps the data and `agents/` acts on it.
"""

from __future__ import annotations

import enum
import random
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from fnmatch import translate
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from .arguments import CheckedStruct, check_choice, check_flag, check_instance, check_text, refused, shown
from .backoff import Backoff
from .errors import Fenced, InvalidArgument
from .field_limits import (
    MAX_ATTEMPTS,
    MAX_ELAPSED_S,
    MAX_MULTIPLIER,
    MAX_OFFSET,
    MAX_RETRY_DELAY_S,
    MAX_SELECTOR,
    check_times,
)
from .identity import SequenceToken, StreamId, unquote

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EPHEMERAL = "ephemeral-"
"""Prefix of the names of temporary subscriptions, such as those of `headrace subscribe` without `--name`. Deleting one
needs only the permission to subscribe to its streams."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


CONSUMER_SEPARATOR = "~"
"""Mode broadcast stores each consumer's position under the subscription `NAME~CONSUMER`. Names that a user chooses do
not have this character."""
MAX_CONSUMER = 100


def check_subscription_name(name: str) -> str:
    """Return the name of a subscription, or raise InvalidArgument. The name may become a part of a path."""
    return check_name("subscription name", name)


def check_provider_name(name: str) -> str:
    """Return the name of a provider, or raise InvalidArgument. The name may become a part of a path."""
    return check_name("provider name", name)


def check_name(kind: str, name: str) -> str:
    """Return `name`, or raise InvalidArgument. `kind` says in messages what is named."""
    if not _NAME.fullmatch(check_text("name", name)):
        raise InvalidArgument(
            f"{shown(name)} is not a {kind}: letters, digits, dot, dash and underscore, at most 128, "
            "starting with a letter or digit"
        )
    return name


def check_stored_name(name: str) -> str:
    """Like `check_subscription_name`, but accept also names of consumers' positions (`NAME~CONSUMER`)."""
    for part in name.split(CONSUMER_SEPARATOR, 1):
        check_subscription_name(part)
    return name


def check_consumer(consumer: str) -> str:
    """Return a consumer's id, or raise InvalidArgument. The id may become a part of a subscription's name."""
    if len(check_text("consumer", consumer)) > MAX_CONSUMER or not _NAME.fullmatch(consumer):
        raise InvalidArgument(
            f"{consumer[:200]!r} is not an id of a consumer: letters, digits, dot, dash and underscore, at most "
            f"{MAX_CONSUMER}, starting with a letter or digit"
        )
    return consumer


class SlowConsumer(enum.Enum):
    """The policy for a consumer that is too slow for the cache."""

    THROTTLE = "throttle"
    """The cache fills, and the queue is read at the pace of the slowest consumer."""
    DETACH = "detach"
    """A cursor that holds the oldest bucket for too long leaves the cache, and its stream is read from the queue
    separately."""


class Mode(enum.Enum):
    """How the consumers of a subscription share its events."""

    SHARED = "shared"
    """The next events of any stream go to a consumer with credit."""
    BOUND = "bound"
    """Each queue is assigned to one consumer, so all events of a stream go to the same consumer."""
    BROADCAST = "broadcast"
    """Every consumer gets all events, and has its own position."""

    @classmethod
    def of(cls, given: Mode | str) -> Mode:
        """Return the mode itself, or the mode of that text. Raises InvalidArgument."""
        try:
            return cls(given)
        except ValueError:
            names = ", ".join(repr(mode.value) for mode in cls)
            raise InvalidArgument(f"{given!r} is not a mode of a subscription: use one of {names}") from None


class OnFailure(enum.Enum):
    """The action on an event whose retries are exhausted."""

    DEAD_LETTER = "dead-letter"
    SKIP = "skip"
    PAUSE = "pause"


class RetryPolicy(msgspec.Struct, metaclass=CheckedStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exponential backoff with jitter, limited by attempts and by time: the limit that is reached first ends it."""

    max_attempts: int = 8
    """Highest number of deliveries of one event, including the first: 1 to 2,147,483,647."""
    max_elapsed_s: float = 300.0
    """Give up when this long has passed since the first attempt, in seconds: 0 to 36,500 days."""
    initial_delay_s: float = 0.1
    """Delay before the second attempt, in seconds: 0 to 30 days."""
    max_delay_s: float = 30.0
    """Longest delay between two attempts, in seconds: 0 to 30 days."""
    multiplier: float = 2.0
    """Factor between one delay and the next: 1 to 1,000,000."""

    def __post_init__(self) -> None:
        for name, (lowest, highest) in _RETRY_LIMITS.items():
            value: Any = getattr(self, name)
            kind, number = (int, "whole number") if name == "max_attempts" else (int | float, "number")
            # False for NaN, too.
            if isinstance(value, bool) or not isinstance(value, kind) or not lowest <= value <= highest:
                unit = " of seconds" if name.endswith("_s") else ""
                raise InvalidArgument(f"retry.{name} is a {number}{unit} from {lowest} to {highest:,}, not {value!r}")

    def delay(self, attempts: int, elapsed_s: float, rng: random.Random) -> float | None:
        """Return the seconds to wait before the next attempt, after `attempts` failed ones; None to give up.

        The wait grows by `multiplier` from `initial_delay_s` up to `max_delay_s`. A random part, up to half, is taken
        off.
        """
        if attempts >= self.max_attempts or elapsed_s >= self.max_elapsed_s:
            return None
        return self.backoff(attempts, rng)

    def backoff(self, attempts: int, rng: random.Random) -> float:
        """Seconds to wait after `attempts` failed attempts, however many there may be."""
        return Backoff(self.initial_delay_s, self.max_delay_s, factor=self.multiplier, rng=rng).after(attempts)


_RETRY_LIMITS = {
    "max_attempts": (1, MAX_ATTEMPTS),
    "max_elapsed_s": (0, MAX_ELAPSED_S),
    "initial_delay_s": (0, MAX_RETRY_DELAY_S),
    "max_delay_s": (0, MAX_RETRY_DELAY_S),
    "multiplier": (1, MAX_MULTIPLIER),
}

_WILDCARD = re.compile(r"([*?])")


class Selector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pattern of streams: text `namespace/key`, split at the first slash and percent-encoded as in a `StreamId`.

    In both parts `*` matches any text, also slashes and the empty text, and `?` matches one character. `%2A` and `%3F`
    are the characters themselves. A selector without `*` and `?` is the text form of one stream and selects that
    stream.
    """

    pattern: str

    @classmethod
    def of(cls, given: object) -> Selector:
        """Return the selector itself, or the selector of a text or of one stream. Raises InvalidArgument."""
        if isinstance(given, Selector):
            return given
        if not isinstance(given, str | StreamId):
            raise refused("selector", given, "a StreamId, or a str such as 'orders/42' or 'orders/*'")
        return cls(str(given))

    def __post_init__(self) -> None:
        check_text("selector", self.pattern)
        if len(self.pattern) > MAX_SELECTOR:
            raise InvalidArgument(f"a selector has at most {MAX_SELECTOR:,} characters, not {len(self.pattern):,}")
        namespace, slash, key = self.pattern.partition("/")
        if not slash:
            raise InvalidArgument(
                f"{self.pattern!r} selects no stream: write namespace/key, or namespace/* for all keys"
            )
        if self.explicit:
            StreamId.parse(self.pattern)
        for part in (namespace, key):
            self._glob(part)

    @property
    def explicit(self) -> bool:
        return _WILDCARD.search(self.pattern) is None

    def matcher(self) -> Callable[[StreamId], bool]:
        """Return a fast predicate: whether the selector matches a stream."""
        if self.explicit:
            return StreamId.parse(self.pattern).__eq__
        namespace, _, key = self.pattern.partition("/")
        if key == "*" and not _WILDCARD.search(namespace):
            only = unquote(namespace, self.pattern)
            return lambda stream: stream[0] == only
        in_namespace, in_key = (re.compile(translate(self._glob(part))) for part in (namespace, key))

        @lru_cache(maxsize=65536)
        def matches(stream: StreamId) -> bool:
            return in_namespace.match(stream[0]) is not None and in_key.match(stream[1]) is not None

        return matches

    def _glob(self, part: str) -> str:
        """Return the part as a pattern of `fnmatch`, which has literal characters in brackets."""
        pieces = _WILDCARD.split(part)
        pieces[::2] = [re.sub(r"([*?[])", r"[\1]", unquote(piece, self.pattern)) for piece in pieces[::2]]
        return "".join(pieces)


class StartKind(enum.Enum):
    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSETS = "offsets"
    TIME = "time"


def _check_start_token(text: str) -> None:
    token = SequenceToken.parse(text)
    if max(token) > MAX_OFFSET:
        raise InvalidArgument(f"{text!r} is not a token: an offset or index is at most {MAX_OFFSET}")


class Start(msgspec.Struct, metaclass=CheckedStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The start position of a subscription, or the target of a seek."""

    kind: StartKind
    token: str | None = None
    time_us: int | None = None

    def __post_init__(self) -> None:
        given = (self.token is not None, self.time_us is not None)
        if given != (self.kind is StartKind.OFFSETS, self.kind is StartKind.TIME):
            raise InvalidArgument(f"a start of kind {self.kind.value} has the wrong fields: make it with Start.parse")
        if self.token is not None:
            _check_start_token(self.token)
        if self.time_us is not None:
            check_times((self.time_us,), "the time of a start")

    @classmethod
    def earliest(cls) -> Start:
        return cls(kind=StartKind.EARLIEST)

    @classmethod
    def latest(cls) -> Start:
        return cls(kind=StartKind.LATEST)

    @classmethod
    def at(cls, token: SequenceToken) -> Start:
        """Start at this token. A token is a position in one queue, so the subscription must select one stream."""
        return cls(kind=StartKind.OFFSETS, token=str(token))

    @classmethod
    def since(cls, when: datetime) -> Start:
        """Start at the first event that was stored at or after `when`, which must have a time zone."""
        check_instance("when", when, datetime, "datetime.now(UTC)")
        if when.tzinfo is None:
            raise InvalidArgument(f"start time {when.isoformat()} has no time zone: add one, such as +00:00")
        return cls(kind=StartKind.TIME, time_us=(when - _EPOCH) // timedelta(microseconds=1))

    @classmethod
    def of(cls, given: object) -> Start:
        """Return the start itself, or the start that a text means (`parse`). Raises InvalidArgument."""
        if isinstance(given, Start):
            return given
        if not isinstance(given, str):
            raise refused("start", given, "a Start, such as Start.earliest(), or its text")
        return cls.parse(given)

    @classmethod
    def parse(cls, text: str) -> Start:
        """Read `earliest`, `latest`, a token such as 1200 or 1200.7, or a time such as 2026-11-21T10:00:00+00:00."""
        if text in ("earliest", "latest"):
            return cls(kind=StartKind(text))
        if re.fullmatch(r"[\d.]+", text, re.ASCII):
            return cls.at(SequenceToken.parse(text))
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidArgument(
                f"{text!r} is not a start: use earliest, latest, a token such as 1200.7, or a time such as "
                "2026-11-21T10:00:00+00:00"
            ) from None
        return cls.since(when)


class SubscriptionDefinition(
    msgspec.Struct, metaclass=CheckedStruct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The stored options of a subscription. Creating it again with an equal definition is a no-op; with another, an
    error."""

    name: str
    selector: Selector
    start: Start = msgspec.field(default_factory=Start.latest)
    retry: RetryPolicy = msgspec.field(default_factory=RetryPolicy)
    on_failure: OnFailure = OnFailure.DEAD_LETTER
    slow_consumer: SlowConsumer | None = None
    """None: detach if the queue can rewind, else throttle."""
    filter: str | None = None
    """The name of the filter function. Subscribing with another filter under the same name is an error."""
    mode: Mode = Mode.SHARED
    circuit_breaker: bool = True
    """Hold the subscription while deliveries of many streams fail, instead of giving up on their events."""

    def __post_init__(self) -> None:
        self._check_types()
        check_stored_name(self.name)
        if self.start.kind is StartKind.OFFSETS and not self.selector.explicit:
            raise InvalidArgument(
                f"subscription {self.name!r}: a token is a position in one queue, so it can only start a subscription "
                f"to one stream, not {self.selector.pattern!r}; start it at a time instead"
            )

    def _check_types(self) -> None:
        # msgspec checks types when it decodes, not when a value is constructed.
        check_text("name", self.name)
        where = f"subscription {shown(self.name)}: "
        check_instance(f"{where}selector", self.selector, Selector, "Selector('orders/*')")
        check_instance(f"{where}start", self.start, Start, "Start.earliest()")
        check_instance(f"{where}retry", self.retry, RetryPolicy, "RetryPolicy(max_attempts=3)")
        check_choice(f"{where}on_failure", self.on_failure, OnFailure)
        check_choice(f"{where}slow_consumer", self.slow_consumer, SlowConsumer, optional=True)
        check_choice(f"{where}mode", self.mode, Mode)
        check_flag(f"{where}circuit_breaker", self.circuit_breaker)
        if self.filter is not None:
            check_text(f"{where}filter", self.filter)


def check_definition(definition: SubscriptionDefinition) -> None:
    """Check that a user may choose the name of this definition. Raises InvalidArgument."""
    check_instance("definition", definition, SubscriptionDefinition)
    check_subscription_name(definition.name)


def is_parent(definition: SubscriptionDefinition) -> bool:
    """Whether this is a subscription of mode broadcast, and not the stored position of one of its consumers."""
    return definition.mode is Mode.BROADCAST and CONSUMER_SEPARATOR not in definition.name


def of_consumer(definition: SubscriptionDefinition, consumer: str) -> SubscriptionDefinition:
    """Return the definition that stores the position of one consumer of a subscription of mode broadcast."""
    return msgspec.structs.replace(definition, name=f"{definition.name}{CONSUMER_SEPARATOR}{consumer}")


def parent_of(definition: SubscriptionDefinition) -> SubscriptionDefinition:
    """Return the definition of the user's subscription to which a consumer's position belongs. The reverse of
    `of_consumer`; another definition stays as it is."""
    return msgspec.structs.replace(definition, name=parent_name(definition.name))


def parent_name(name: str) -> str:
    """Return the name of the user's subscription, of which `name` may be one consumer's position."""
    return name.partition(CONSUMER_SEPARATOR)[0]


def is_consumers_position(definition: SubscriptionDefinition) -> bool:
    """Whether this only stores the position of one consumer of a subscription of mode broadcast."""
    return CONSUMER_SEPARATOR in definition.name


def is_position_of(name: str, parent: str) -> bool:
    """Whether `name` stores the position of one consumer of the subscription `parent`."""
    return name.startswith(f"{parent}{CONSUMER_SEPARATOR}")


def redefined(name: str) -> Fenced:
    """Return the error for a subscription that was created anew with another definition. `name` may be the position of
    one of its consumers."""
    return Fenced(f"subscription {parent_name(name)!r} was deleted, and has another definition now")


def position_names(definition: SubscriptionDefinition, stored: Iterable[SubscriptionDefinition]) -> list[str]:
    """Return the names under which a subscription's positions are stored: its own, or with mode broadcast those of its
    consumers."""
    if not is_parent(definition):
        return [definition.name]
    return [each.name for each in stored if is_position_of(each.name, definition.name)]


class StreamBehind(NamedTuple):
    """A stream that is behind its subscription's checkpoint: its next event, and, if it is paused, the reason."""

    token: SequenceToken
    paused: str = ""
    done: tuple[tuple[int, int, int], ...] = ()
    """Finished events after `token`, acknowledged out of order: (offset, first index, last index exclusive)."""


class Checkpoint(NamedTuple):
    """Progress of a subscription in one queue, as stored.

    All events below `next_offset` (exclusive) are done, except in the streams in `behind`, which are done up to their
    own token. Deliveries within a stream are in order. So a checkpoint is exact, and its size is the number of streams
    behind, not the number of gaps.
    """

    next_offset: int
    behind: Mapping[StreamId, StreamBehind] = {}

    @property
    def watermark(self) -> int:
        """The lowest offset that the subscription still needs."""
        return min([self.next_offset, *(b.token.offset for b in self.behind.values())])

    @property
    def awaited(self) -> int:
        """The lowest offset that the subscription still needs, without streams that are paused."""
        return min([self.next_offset, *(b.token.offset for b in self.behind.values() if not b.paused)])

    def wants(self, stream: StreamId, offset: int) -> bool:
        """Whether an event of the batch at `offset`, of this stream, must still be delivered."""
        behind = self.behind.get(stream)
        return offset >= (self.next_offset if behind is None else behind.token.offset)


def lowest_positions(positions: Iterable[Mapping[int, Checkpoint]]) -> dict[int, Checkpoint]:
    """Return, by queue, the checkpoint with the lowest watermark."""
    lowest: dict[int, Checkpoint] = {}
    for one in positions:
        for queue, at in one.items():
            if queue not in lowest or at.watermark < lowest[queue].watermark:
                lowest[queue] = at
    return dict(sorted(lowest.items()))


class DeadLetter(NamedTuple):
    """An event given up on."""

    id: int
    """0 until stored."""
    provider: str
    subscription: str
    queue: int
    stream: StreamId
    token: SequenceToken
    payload: bytes
    headers: Mapping[str, str]
    event_id: str | None
    timestamp_us: int
    reason: str
    attempts: int
    failed_at_us: int
    redrive: bool = False
    """Whether a redrive was requested and is not finished."""


class GapRecord(NamedTuple):
    """A range of events that a subscription will not get, and the reason."""

    provider: str
    subscription: str
    queue: int
    stream: StreamId | None
    low: SequenceToken
    high: SequenceToken
    reason: str
    at_us: int
