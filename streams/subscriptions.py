"""Subscriptions: durable, named interest in streams, and what they remember.

A subscription is a definition (selector, start, failure policy) plus a checkpoint per queue. Decisions are pure
functions here; the control store keeps the data and `agents/` acts on it.
"""

from __future__ import annotations

import enum
import math
import random
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from fnmatch import translate
from functools import lru_cache
from types import NoneType
from typing import NamedTuple

import msgspec

from .errors import InvalidArgument
from .identity import SequenceToken, StreamId, unquote

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EPHEMERAL = "ephemeral-"
"""How the names of subscriptions begin that are only for the time being, as those of `headrace subscribe` without
`--name`: whoever may subscribe to them may delete them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


CONSUMER_SEPARATOR = "~"
"""Mode broadcast: between the names of subscription and consumer, in the name of what holds that consumer's position.
No subscription that a user makes has it in its name."""
MAX_CONSUMER = 100


def check_subscription_name(name: str) -> str:
    """Return `name`, or raise InvalidArgument: it may be part of a path."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} is no subscription name: letters, digits, dot, dash and underscore, at most 128, "
            "starting with a letter or digit"
        )
    return name


def check_stored_name(name: str) -> str:
    """`check_subscription_name`, for what the store has: also positions of consumers."""
    for part in name.split(CONSUMER_SEPARATOR, 1):
        check_subscription_name(part)
    return name


def check_consumer(consumer: str) -> str:
    """Return a consumer's id, or raise InvalidArgument: it may be part of a subscription's name."""
    if len(consumer) > MAX_CONSUMER or not _NAME.fullmatch(consumer):
        raise InvalidArgument(
            f"{consumer[:200]!r} is no id of a consumer: letters, digits, dot, dash and underscore, at most "
            f"{MAX_CONSUMER}, starting with a letter or digit"
        )
    return consumer


class SlowConsumer(enum.Enum):
    """What happens when a consumer is too slow for the cache."""

    THROTTLE = "throttle"
    """The cache fills and pulling slows down to the slowest."""
    DETACH = "detach"
    """A cursor that holds the oldest bucket too long leaves the cache and reads its own way through the queue."""


class Mode(enum.Enum):
    """How the consumers of a subscription share its events."""

    SHARED = "shared"
    """The next events of any stream go to a consumer with credit."""
    BOUND = "bound"
    """The queues are dealt out to the consumers, so all events of a stream go to the same one."""
    BROADCAST = "broadcast"
    """Every consumer gets everything, each with a position of its own."""

    @classmethod
    def of(cls, given: Mode | str) -> Mode:
        """A mode, or its text. Raises InvalidArgument."""
        try:
            return cls(given)
        except ValueError:
            names = ", ".join(repr(mode.value) for mode in cls)
            raise InvalidArgument(f"{given!r} is no mode of a subscription: it is one of {names}") from None


class OnFailure(enum.Enum):
    """What happens to an event when the retry policy is exhausted."""

    DEAD_LETTER = "dead-letter"
    SKIP = "skip"
    PAUSE = "pause"


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exponential backoff with jitter, limited by attempts and by time, whichever ends first."""

    max_attempts: int = 8
    """Deliveries of one event at the most, the first included; at least 1."""
    max_elapsed_s: float = 300.0
    """Give up when this long has passed since the first attempt, in seconds."""
    initial_delay_s: float = 0.1
    max_delay_s: float = 30.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise InvalidArgument(f"retry.max_attempts is at least 1, not {self.max_attempts}")
        for name in ("max_elapsed_s", "initial_delay_s", "max_delay_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidArgument(f"retry.{name} is a finite number of seconds from 0, not {getattr(self, name)}")
        if not 1 <= self.multiplier < math.inf:
            raise InvalidArgument(f"retry.multiplier is a finite number from 1, not {self.multiplier}")

    def delay(self, attempts: int, elapsed_s: float, rng: random.Random) -> float | None:
        """Seconds to wait before the next attempt after `attempts` failed ones, or None to give up.

        It grows by `multiplier` from `initial_delay_s` up to `max_delay_s`, less a random part of up to half of it.
        """
        if attempts >= self.max_attempts or elapsed_s >= self.max_elapsed_s:
            return None
        ceiling = min(self.max_delay_s, self._backoff(attempts))
        return rng.uniform(ceiling / 2, ceiling)

    def _backoff(self, attempts: int) -> float:
        try:
            return self.initial_delay_s * self.multiplier ** (attempts - 1)
        except OverflowError:
            return self.max_delay_s if self.initial_delay_s else 0.0


_WILDCARD = re.compile(r"([*?])")


class Selector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which streams: text `namespace/key`, split at the first slash and percent-encoded as `StreamId`'s text form.

    In either part `*` stands for any text, also slashes and nothing, and `?` for any one character. Without either it
    is exactly one stream (an explicit subscription), so a stream's text form selects that stream. `%2A` and `%3F` are
    the characters themselves.
    """

    pattern: str

    def __post_init__(self) -> None:
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
        """A fast predicate over streams."""
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
        """The part in the language of `fnmatch`, which brackets what is meant literally."""
        pieces = _WILDCARD.split(part)
        pieces[::2] = [re.sub(r"([*?[])", r"[\1]", unquote(piece, self.pattern)) for piece in pieces[::2]]
        return "".join(pieces)


class StartKind(enum.Enum):
    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSETS = "offsets"
    TIME = "time"


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a subscription starts, or is moved to by a seek."""

    kind: StartKind
    token: str | None = None
    time_us: int | None = None

    def __post_init__(self) -> None:
        given = (self.token is not None, self.time_us is not None)
        if given != (self.kind is StartKind.OFFSETS, self.kind is StartKind.TIME):
            raise InvalidArgument(f"a start of kind {self.kind.value} has the wrong fields: make it with Start.parse")
        if self.token is not None:
            SequenceToken.parse(self.token)

    @classmethod
    def earliest(cls) -> Start:
        return cls(kind=StartKind.EARLIEST)

    @classmethod
    def latest(cls) -> Start:
        return cls(kind=StartKind.LATEST)

    @classmethod
    def at(cls, token: SequenceToken) -> Start:
        """From this token on. Tokens belong to a queue: only for a subscription to one stream."""
        return cls(kind=StartKind.OFFSETS, token=str(token))

    @classmethod
    def since(cls, when: datetime) -> Start:
        """From the first event stored at or after `when`, which carries a time zone."""
        if when.tzinfo is None:
            raise InvalidArgument(f"start time {when.isoformat()} has no time zone: add one, such as +00:00")
        return cls(kind=StartKind.TIME, time_us=(when - _EPOCH) // timedelta(microseconds=1))

    @classmethod
    def parse(cls, text: str) -> Start:
        """`earliest`, `latest`, a token such as 1200 or 1200.7, or a time such as 2026-11-21T10:00:00+00:00."""
        if text in ("earliest", "latest"):
            return cls(kind=StartKind(text))
        if re.fullmatch(r"[\d.]+", text, re.ASCII):
            return cls.at(SequenceToken.parse(text))
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidArgument(
                f"{text!r} is no start: use earliest, latest, a token such as 1200.7, or a time such as "
                "2026-11-21T10:00:00+00:00"
            ) from None
        return cls.since(when)


class SubscriptionDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes a subscription. Creating it again with an equal definition is a no-op; with another, an error."""

    name: str
    selector: Selector
    start: Start = msgspec.field(default_factory=Start.latest)
    retry: RetryPolicy = msgspec.field(default_factory=RetryPolicy)
    on_failure: OnFailure = OnFailure.DEAD_LETTER
    slow_consumer: SlowConsumer | None = None
    """None: detach where the queue can rewind, else throttle."""
    filter: str | None = None
    """The name of the filter, part of the definition: another filter is another subscription."""
    mode: Mode = Mode.SHARED

    def __post_init__(self) -> None:
        self._check_types()
        check_stored_name(self.name)
        if self.start.kind is StartKind.OFFSETS and not self.selector.explicit:
            raise InvalidArgument(
                f"subscription {self.name}: a token is a position in one queue, so it can only start a subscription to "
                f"one stream, not {self.selector.pattern!r}; start it at a time instead"
            )

    def _check_types(self) -> None:
        # msgspec checks what it decodes, not what is constructed; "pause" would be taken for no policy at all.
        for name, kind in _DEFINITION_TYPES.items():
            if not isinstance(value := getattr(self, name), kind):
                expected = " or ".join(one.__name__ for one in kind)
                raise InvalidArgument(f"subscription {self.name!r}: {name} is a {expected}, not {value!r}")


def is_parent(definition: SubscriptionDefinition) -> bool:
    """Whether it is a subscription of mode broadcast itself, not that of one of its consumers."""
    return definition.mode is Mode.BROADCAST and CONSUMER_SEPARATOR not in definition.name


def of_consumer(definition: SubscriptionDefinition, consumer: str) -> SubscriptionDefinition:
    """Mode broadcast: what holds the position of one consumer."""
    return msgspec.structs.replace(definition, name=f"{definition.name}{CONSUMER_SEPARATOR}{consumer}")


_DEFINITION_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "selector": (Selector,),
    "start": (Start,),
    "retry": (RetryPolicy,),
    "on_failure": (OnFailure,),
    "slow_consumer": (SlowConsumer, NoneType),
    "filter": (str, NoneType),
    "mode": (Mode,),
}


class Behind(NamedTuple):
    """A stream that is behind its subscription's checkpoint: its next event, and why it is paused where it is."""

    token: SequenceToken
    paused: str = ""
    done: tuple[tuple[int, int, int], ...] = ()
    """What is done after `token`, where a consumer acknowledged out of order: (offset, first index, last exclusive)."""


class Checkpoint(NamedTuple):
    """Progress of a subscription in one queue, as stored.

    Everything below `next_offset` (exclusive) is done, except for the streams in `behind`, which are done up to their
    own token. Deliveries within a stream are in order, so this is exact however streams interleave, and its size is the
    number of streams behind, not the number of gaps.
    """

    next_offset: int
    behind: Mapping[StreamId, Behind] = {}

    @property
    def watermark(self) -> int:
        """The lowest offset still needed."""
        return min([self.next_offset, *(b.token.offset for b in self.behind.values())])

    def wants(self, stream: StreamId, offset: int) -> bool:
        """Whether any event of the batch at `offset` is still to be delivered."""
        behind = self.behind.get(stream)
        return offset >= (self.next_offset if behind is None else behind.token.offset)


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
    """Asked to be delivered once more."""


class GapRecord(NamedTuple):
    """Events that a subscription will not get, and why: the explicit trace that invariant 6 asks for."""

    provider: str
    subscription: str
    queue: int
    stream: StreamId | None
    low: SequenceToken
    high: SequenceToken
    reason: str
    at_us: int
