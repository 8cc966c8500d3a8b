"""How a consumer's code looks to headrace: an async function per event, per batch, or an observer object.

Also the registry behind the `@subscription` decorator, with which modules declare implicit subscriptions.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from .errors import InvalidArgument
from .events import Event, EventBatch
from .identity import StreamId
from .subscriptions import Selector, SubscriptionDefinition

EventHandler = Callable[[Event], Awaitable[None]]
BatchHandler = Callable[[EventBatch], Awaitable[None]]
EventFilter = Callable[[Event], bool]
"""True to deliver. A filter that raises lets the event through: losing it would be worse."""


@runtime_checkable
class Observer(Protocol):
    """An object that consumes per event. All of `on_next_batch`, `on_error` and `on_completed` are optional.

    With `on_next_batch(batch)` it consumes per batch instead. `on_error(error)` is told of every event given up on, and
    `on_completed()` that the subscription ended here (closed or deleted).
    """

    async def on_next(self, event: Event, /) -> None: ...


@runtime_checkable
class BatchObserver(Protocol):
    """An object that consumes per batch."""

    async def on_next_batch(self, batch: EventBatch, /) -> None: ...


AnyHandler = EventHandler | BatchHandler | Observer | BatchObserver


class Handler(NamedTuple):
    """A consumer's code, sorted out: exactly one of `on_event` and `on_batch` is set."""

    on_event: EventHandler | None
    on_batch: BatchHandler | None
    on_error: Callable[[Exception], Awaitable[None]] | None
    on_completed: Callable[[], Awaitable[None]] | None

    @classmethod
    def of(cls, handler: Any, *, batch: bool) -> Handler:
        """Recognise what the user gave. Raises InvalidArgument where it is neither coroutine function nor observer."""
        if isinstance(handler, type):
            raise InvalidArgument(f"{handler.__name__} is a class: give an instance of it, {handler.__name__}()")
        optional = (_method(handler, "on_error"), _method(handler, "on_completed"))
        if on_batch := _method(handler, "on_next_batch"):
            return cls(None, on_batch, *optional)
        if on_next := _method(handler, "on_next"):
            return cls(on_next, None, *optional)
        if not _is_async(handler):
            raise InvalidArgument(
                f"a handler is an async function or an object with an async on_next or on_next_batch, not {handler!r}"
            )
        return cls(None, handler, None, None) if batch else cls(handler, None, None, None)


def filter_name(predicate: EventFilter) -> str:
    """The name under which a filter is part of a subscription's definition. Raises InvalidArgument for what is no
    filter: a coroutine would let everything through."""
    if not callable(predicate) or _is_async(predicate):
        raise InvalidArgument(f"a filter is a function of an Event that returns a bool at once, not {predicate!r}")
    module = getattr(predicate, "__module__", "") or ""
    return f"{module}:{getattr(predicate, '__qualname__', type(predicate).__qualname__)}"


class Declared(NamedTuple):
    """A subscription declared in code with `@subscription`."""

    provider: str
    definition: SubscriptionDefinition
    handler: AnyHandler
    batch: bool
    filter: EventFilter | None
    concurrency: int


_declared: dict[tuple[str, str], Declared] = {}

_H = TypeVar("_H")


def subscription(
    name: str,
    selector: str | StreamId,
    *,
    provider: str = "default",
    batch: bool = False,
    filter: EventFilter | None = None,  # noqa: A002 (the word of the field)
    concurrency: int = 100,
    **definition: Any,
) -> Callable[[_H], _H]:
    """Declare a subscription: the decorated function or observer class instance consumes `selector` in every silo that
    loads its module. Further keywords are those of `SubscriptionDefinition` (start, retry, on_failure, slow_consumer).

    Raises InvalidArgument where the definition is wrong or the name is declared twice.
    """
    defined = SubscriptionDefinition(
        name=name,
        selector=Selector(str(selector)),
        filter=filter_name(filter) if filter else None,
        **definition,
    )

    def declare(handler: _H) -> _H:
        Handler.of(handler, batch=batch)
        if (provider, name) in _declared:
            raise InvalidArgument(f"subscription {name!r} of provider {provider!r} is declared twice")
        _declared[provider, name] = Declared(provider, defined, handler, batch, filter, concurrency)  # type: ignore[arg-type]
        return handler

    return declare


def declared(provider: str | None = None) -> list[Declared]:
    """What was declared so far, for one provider or all."""
    return [d for d in _declared.values() if provider in (None, d.provider)]


def _method(handler: Any, name: str) -> Any:
    method = getattr(handler, name, None)
    if method is None:
        return None
    if not _is_async(method):
        raise InvalidArgument(f"{name} of {handler!r} has to be an async function")
    return method


def _is_async(function: Any) -> bool:
    if inspect.iscoroutinefunction(function):
        return True
    return callable(function) and inspect.iscoroutinefunction(type(function).__call__)
