"""Handlers whose effects are applied exactly once: the interface between deliveries and the database of the effects.

`headrace.effects` implements it. Deliveries know only these protocols.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from .codecs import P
from .errors import HeadraceError, PayloadInvalid
from .events import Event, EventBatch
from .identity import StreamId
from .lost_generations import CurrentGeneration, LostGenerations

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

EventEffectHandler = Callable[[Event, T], Awaitable[None]]
BatchEffectHandler = Callable[[EventBatch, T], Awaitable[None]]
PayloadEffectHandler = Callable[[P, T], Awaitable[None]] | Callable[[P, Event, T], Awaitable[None]]
"""Takes the value of a payload, perhaps the event, and a transaction."""


class RedriveRefused(HeadraceError):
    """It is not known whether the effects of a dead letter are committed, so it stays. The text names the choices."""

    code = "redrive_refused"


class MisplacedEvent(PayloadInvalid):
    """An event with effects comes from another queue than other events of its stream: it has no place in their order.
    The subscription gives up on it at once."""

    code = "misplaced_event"


class StreamQueues(Protocol):
    """Says which queues have the events of a stream. See `StreamMapper` in the adapter seam."""

    @property
    def name(self) -> str: ...

    def queue_of(self, stream: StreamId) -> int: ...

    def queues_with(self, stream: StreamId) -> Sequence[int]: ...


class ProviderOrigin(NamedTuple):
    """The provider and the subscription of a consumer."""

    origin: str
    """Id of the provider; "" if the silo does not tell it."""
    provider: str
    subscription: str
    shared: bool
    """Whether each event goes to one consumer of the subscription only."""
    current_generation: CurrentGeneration | None = None

    def scope(self, queue: int, generation: int) -> EffectScope:
        """Return the scope of the effects of events of this queue."""
        current = self.current_generation
        lost = None if current is None else LostGenerations(self.subscription, queue, generation, current)
        return EffectScope(self.origin, self.subscription, queue, generation, self.provider, lost=lost)


class EffectScope(NamedTuple):
    """The events of one queue that one subscription gets."""

    origin: str
    """Id of the provider. A provider that is made anew has another one."""
    subscription: str
    queue: int
    generation: int
    """It rises with each seek: effects of earlier generations are applied again."""
    provider: str = "default"
    """Name of the provider."""
    queues: StreamQueues | None = None
    """The queues into which other programs must write a stream. None: not known, or headrace alone writes."""
    lost: LostGenerations | None = None
    """Generations that the control store has lost. None: the store cannot be asked, and a position with a later
    generation means that the scope is out of date."""


@dataclass(slots=True)
class EffectCounts:
    """Counts of effects. The delivery of a queue keeps them in its `DeliveryCounts`."""

    already_applied: int = 0
    """Events whose effects had been committed before: their handler was not called."""


class ScopedEffects(Protocol):
    """Applies the effects of the events of one scope."""

    async def call(self, delivered: Any, /) -> None:
        """Call the user's handler for an event or a batch, in a transaction, if the effects are not committed yet."""
        ...

    async def redrive(self, event: Event) -> None:
        """Call the user's handler for an event that was given up on, unless its effects are committed. Raises
        RedriveRefused if it is not known whether they are."""
        ...

    async def failed(self, events: Sequence[Event]) -> None:
        """The delivery is about to record dead letters of these events of one stream: note that their effects are not
        committed, so that a redrive applies them. Raises Unavailable; calling it again is harmless."""
        ...

    async def check_position(self, events: Sequence[Event]) -> None:
        """The delivery is about to record a gap for these events of one stream. Raises Unavailable if the position
        cannot be moved past them at present."""
        ...

    async def given_up(self, events: Sequence[Event]) -> None:
        """The delivery gave up on these events of one stream, and has recorded it: later deliveries skip them. Raises
        Unavailable; calling it again is harmless."""
        ...


class HandlerEffects(Protocol[T_co]):
    """The database in which the effects of handlers are applied."""

    async def check(self) -> None:
        """Raise NotFound if the database has no tables for effects, InvalidArgument if its engine commits each
        statement, Unavailable if it cannot be reached."""
        ...

    def scoped(
        self, handler: Callable[[Any, T_co], Awaitable[None]], scope: EffectScope, counts: EffectCounts, *, batch: bool
    ) -> ScopedEffects:
        """Return the effects of one scope. `handler` takes an event, or with `batch` a batch, and a transaction."""
        ...
