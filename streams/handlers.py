"""Handlers, the user's code: async functions of an event or of a batch, and observer objects.

This module also has the decorator `@subscription`, with which modules declare subscriptions, and its registry.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, Unpack, overload, runtime_checkable

from .arguments import check_flag, check_integer, check_options, check_text, refused, shown
from .codecs import Codecs, P, name_of
from .errors import InvalidArgument, NotSupported
from .events import Event, EventBatch
from .identity import StreamId
from .options import EventFilter, LocalHandlerOptions
from .payload_handlers import PayloadArgument, payload_argument
from .subscriptions import Selector, Start, SubscriptionDefinition, check_subscription_name
from .transactions import BatchEffectHandler, EventEffectHandler, HandlerEffects, PayloadEffectHandler

CONCURRENCY = 2000
"""Default number of handlers that run at a time: of a queue in a silo, of a subscription in a client. One that waits
takes about 3 KB. It is high because a handler that waits keeps no other from running, and a stuck one should not."""
DEFINITION_OPTIONS = ("start", "retry", "on_failure", "slow_consumer", "circuit_breaker")
HANDLER_OPTIONS = ("batch", "concurrency", *DEFINITION_OPTIONS)
LOCAL_HANDLER_OPTIONS = ("filter", "effects", *HANDLER_OPTIONS)

EventHandler = Callable[[Event], Awaitable[None]]
BatchHandler = Callable[[EventBatch], Awaitable[None]]
PayloadHandler = Callable[[P], Awaitable[None]] | Callable[[P, Event], Awaitable[None]]
"""Takes the value of a payload, and perhaps the event."""


@runtime_checkable
class Observer(Protocol):
    """An object that handles single events. `on_next_batch`, `on_error` and `on_completed` are optional.

    With `on_next_batch(batch)` instead of `on_next`, it handles batches. `on_error(error)` is called for every event
    that is given up on, and `on_completed()` when the subscription ends in this process (closed or deleted).
    """

    async def on_next(self, event: Event, /) -> None: ...


@runtime_checkable
class BatchObserver(Protocol):
    """An object that handles batches."""

    async def on_next_batch(self, batch: EventBatch, /) -> None: ...


AnyHandler = EventHandler | BatchHandler | Observer | BatchObserver | Callable[..., Awaitable[None]]


class Handler(NamedTuple):
    """The user's handler in one form: exactly one of `on_event` and `on_batch` is set."""

    on_event: EventHandler | None
    on_batch: BatchHandler | None
    on_error: Callable[[Exception], Awaitable[None]] | None
    on_completed: Callable[[], Awaitable[None]] | None
    on_redrive: EventHandler | None = None
    """Called with a dead letter that is delivered once more. None: like any other event."""

    @classmethod
    def of(cls, handler: Any, *, batch: bool, codecs: Codecs | None = None) -> Handler:
        """Return the form of the user's handler, an async function or an observer.

        A function takes a batch if `batch` is set. Otherwise it takes an event, or the value of its payload, decoded by
        `codecs`, and then perhaps the event. The annotation of its first argument decides, or else its name.

        Raises InvalidArgument for anything else, and for a type that `codecs` cannot decode. None: this is not checked,
        and the handler must not be called.
        """
        check_flag("batch", batch)
        if isinstance(handler, type):
            raise InvalidArgument(f"{handler.__name__} is a class: give an instance of it, {handler.__name__}()")
        optional = (_method(handler, "on_error", "error"), _method(handler, "on_completed", None))
        if on_batch := _method(handler, "on_next_batch", "batch"):
            return cls(None, on_batch, *optional)
        if on_next := _method(handler, "on_next", "event"):
            if batch:
                raise InvalidArgument("batch=True is for a function: an observer of batches has on_next_batch")
            return cls(_of_events(on_next, f"{type(handler).__name__}.on_next", codecs), None, *optional)
        if inspect.isfunction(handler) and not _is_async(handler):
            raise InvalidArgument(f"handler {handler.__name__} is a plain function: write async def {handler.__name__}")
        if not _is_async(handler):
            raise InvalidArgument(
                "a handler is an async function or an object with an async on_next or on_next_batch, not "
                f"{shown(handler)}"
            )
        name = getattr(handler, "__name__", type(handler).__name__)
        _refuse_transaction(handler, name)
        if batch:
            _check_function(handler, "batch")
            return cls(None, handler, None, None)
        if _payload_argument(handler, name) is None:
            _check_function(handler, "event")
        return cls(_of_events(handler, name, codecs), None, None, None)


def _of_events(handler: Any, name: str, codecs: Codecs | None) -> EventHandler:
    """Return a handler of events that calls `handler` with the value that it takes."""
    payload = _payload_argument(handler, name)
    return handler if payload is None or codecs is None else payload.decoding(handler, codecs)


def _payload_argument(handler: Any, name: str, transactions: int = 0) -> PayloadArgument | None:
    try:
        signature = _signature(handler)
    except (TypeError, ValueError):
        return None  # functions in C may have no signature
    return payload_argument(signature, name, transactions)


def handler_with_transaction(handler: Any, codecs: Codecs, *, batch: bool) -> Callable[[Any, Any], Awaitable[None]]:
    """Return a handler of events, or with `batch` of batches, and of a transaction. `check_effects` accepted `handler`.
    It may take the value of a payload instead of the event, decoded by `codecs`.

    Raises InvalidArgument for a type that they cannot decode."""
    payload = None if batch else _payload_argument(handler, "handler", 1)
    return handler if payload is None else payload.decoding(handler, codecs)


def check_effects(effects: object, handler: Any, *, batch: bool) -> None:
    """Raise InvalidArgument unless `handler` is an async function of an event, or with `batch` of a batch, and of a
    transaction. None: there is no handler yet."""
    missing = [name for name in ("check", "scoped") if not callable(getattr(effects, name, None))]
    if missing:
        raise refused("effects", effects, "Effects(engine), or None")
    if handler is None:
        return
    kind = "batch" if batch else "event"
    if not _is_async(handler):
        raise InvalidArgument(
            f"with effects, a handler is an async function: write async def handler({kind}, tx), not {shown(handler)}"
        )
    name = getattr(handler, "__name__", type(handler).__name__)
    if _takes_transaction_first(handler):
        raise InvalidArgument(f"{name}{_signature(handler)} takes the transaction first: write `{kind}, tx`")
    if batch or _payload_argument(handler, name, 1) is None:
        _check_function(handler, kind, "tx")


def filter_name(predicate: EventFilter) -> str:
    """Return the name of a filter in a subscription's definition. Raises InvalidArgument if it is not a plain function:
    the coroutine that an async function returns would count as true, and let every event through."""
    if not callable(predicate) or _is_async(predicate):
        raise InvalidArgument(f"a filter is a function of an Event that returns a bool at once, not {shown(predicate)}")
    _check_arguments(predicate, "filter", "event")
    module = getattr(predicate, "__module__", "") or ""
    return f"{module}:{getattr(predicate, '__qualname__', type(predicate).__qualname__)}"


class SubscriptionDeclaration(NamedTuple):
    """A subscription with its handler, as `subscribe` or `@subscription` has checked it."""

    provider: str
    definition: SubscriptionDefinition
    handler: AnyHandler
    batch: bool
    filter: EventFilter | None
    concurrency: int
    effects: HandlerEffects[Any] | None = None
    """None: the handler takes only the event or the batch. Otherwise it takes a transaction, too."""

    def check_handler(self) -> None:
        """Raise InvalidArgument if the handler is none, or one of another kind."""
        if self.effects is None:
            Handler.of(self.handler, batch=self.batch)
        else:
            check_effects(self.effects, self.handler, batch=self.batch)

    @classmethod
    def of(
        cls, provider: str, name: str, selector: object, handler: Any, options: Mapping[str, Any]
    ) -> SubscriptionDeclaration:
        """Check the arguments of `subscribe`. The names of the options are checked already. Raises InvalidArgument."""
        check_subscription_name(name)
        predicate, batch = options.get("filter"), options.get("batch", False)
        definition = define(name, selector, options, None if predicate is None else filter_name(predicate))
        check_flag("batch", batch)
        concurrency = check_integer("concurrency", options.get("concurrency", CONCURRENCY), 1)
        effects = options.get("effects")
        if effects is not None:
            check_effects(effects, None, batch=batch)
        return cls(provider, definition, handler, batch, predicate, concurrency, effects)


def check_no_handler_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options of handlers in a `subscribe` without a handler. Raises InvalidArgument, NotSupported."""
    for option, article in (("filter", "a filter is"), ("effects", "effects are")):
        if options.get(option) is not None:
            raise NotSupported(f"subscription {name!r}: {article} for a handler, and there is none: leave it out")
    if given := [option for option in ("batch", "concurrency") if option in options]:
        verb = "is" if len(given) == 1 else "are"
        raise InvalidArgument(f"subscription {name!r}: {' and '.join(given)} {verb} for a handler, and there is none")


def check_no_definition_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options of a definition in a `subscribe` without a selector. Raises InvalidArgument."""
    if given := [option for option in (*DEFINITION_OPTIONS, "mode") if options.get(option) is not None]:
        raise InvalidArgument(
            f"subscription {name!r}: {', '.join(given)} is for a subscription that is created: give its selector, too"
        )


def define(
    name: str, selector: object, options: Mapping[str, Any], filter_named: str | None = None
) -> SubscriptionDefinition:
    """Return the definition of a subscription from the options of `subscribe`. Raises InvalidArgument."""
    given = {key: options[key] for key in ("on_failure", "slow_consumer", "mode", "circuit_breaker") if key in options}
    if options.get("retry") is not None:
        given["retry"] = options["retry"]
    start = options.get("start")
    return SubscriptionDefinition(
        name=name,
        selector=Selector.of(selector),
        start=Start.latest() if start is None else Start.of(start),
        filter=filter_named,
        **given,
    )


_declared: dict[tuple[str, str], SubscriptionDeclaration] = {}

_E = TypeVar("_E", bound=EventHandler | Observer | BatchObserver)
_B = TypeVar("_B", bound=BatchHandler | BatchObserver)
_T = TypeVar("_T")


class HandlerDecorator(Protocol):
    """Decorates a handler of events or of values, as type checkers see it."""

    @overload
    def __call__(self, handler: _E, /) -> _E: ...
    @overload
    def __call__(self, handler: PayloadHandler[P], /) -> PayloadHandler[P]: ...


class EffectHandlerDecorator(Protocol[_T]):
    """Decorates a handler that takes a transaction."""

    @overload
    def __call__(self, handler: EventEffectHandler[_T], /) -> EventEffectHandler[_T]: ...
    @overload
    def __call__(self, handler: PayloadEffectHandler[P, _T], /) -> PayloadEffectHandler[P, _T]: ...


@overload
def subscription(
    name: str,
    selector: str | StreamId,
    *,
    provider: str = "default",
    batch: Literal[False] = False,
    **options: Unpack[LocalHandlerOptions],
) -> HandlerDecorator: ...
@overload
def subscription(
    name: str,
    selector: str | StreamId,
    *,
    provider: str = "default",
    batch: Literal[True],
    **options: Unpack[LocalHandlerOptions],
) -> Callable[[_B], _B]: ...
@overload
def subscription(
    name: str,
    selector: str | StreamId,
    *,
    provider: str = "default",
    batch: Literal[False] = False,
    effects: HandlerEffects[_T],
    **options: Unpack[LocalHandlerOptions],
) -> EffectHandlerDecorator[_T]: ...
@overload
def subscription(
    name: str,
    selector: str | StreamId,
    *,
    provider: str = "default",
    batch: Literal[True],
    effects: HandlerEffects[_T],
    **options: Unpack[LocalHandlerOptions],
) -> Callable[[BatchEffectHandler[_T]], BatchEffectHandler[_T]]: ...
def subscription(
    name: str, selector: str | StreamId | None = None, *, provider: str = "default", **options: Any
) -> Callable[[Any], Any]:
    """Declare a subscription. In every silo that loads the module, the decorated async function or observer handles the
    events of `selector`. A function may take the value of the payload instead of the event: `async def billing(order:
    Order)`, or `async def billing(order: Order, event: Event)`.

    The options are those of `Provider.subscribe` with a handler: batch, concurrency, filter, effects, start, retry,
    on_failure, slow_consumer and circuit_breaker.

    Raises InvalidArgument if an option or the handler is wrong, or if the name is declared twice.
    """
    if selector is None:
        raise InvalidArgument(
            f"subscription: {shown(name)} has no selector: write @subscription('name', 'orders/*') above the handler"
        )
    check_options("subscription", options, ("provider", *LOCAL_HANDLER_OPTIONS))
    made = SubscriptionDeclaration.of(check_text("provider", provider), name, selector, None, options)

    def declare(handler: Any) -> Any:
        made._replace(handler=handler).check_handler()
        if (provider, name) in _declared:
            raise InvalidArgument(f"subscription {name!r} of provider {provider!r} is declared twice")
        _declared[provider, name] = made._replace(handler=handler)
        return handler

    return declare


def declared(provider: str | None = None) -> list[SubscriptionDeclaration]:
    """Return the subscriptions declared so far, for one provider or for all."""
    return [d for d in _declared.values() if provider in (None, d.provider)]


def _method(handler: Any, name: str, argument: str | None) -> Any:
    method = getattr(handler, name, None)
    if method is None:
        return None
    where = f"{type(handler).__name__}.{name}"
    if not _is_async(method):
        raise InvalidArgument(f"{where} has to be an async function: write `async def {name}`")
    if argument == "event" and _payload_argument(method, where) is not None:
        return method
    signature = _check_arguments(method, where, argument)
    if signature is not None and (other := _other_kind(signature, argument)):
        rename = "on_next_batch" if other == "batch" else "on_next"
        raise InvalidArgument(f"{where}{signature} takes {_ARTICLE[other]}: name it {rename}")
    return method


def _is_async(function: Any) -> bool:
    if inspect.iscoroutinefunction(function):
        return True
    return callable(function) and inspect.iscoroutinefunction(type(function).__call__)


# ---- signatures ------------------------------------------------------------------------------------------------------

_KINDS = {"Event": "event", "EventBatch": "batch", "ReceivedBatch": "batch"}
"""Type names in annotations that cannot be evaluated, because they are imported for type checkers only."""
_ARTICLE = {"event": "an event", "batch": "a batch"}


def _check_function(function: Any, argument: str, *more: str) -> None:
    name = getattr(function, "__name__", type(function).__name__)
    signature = _check_arguments(function, name, argument, *more)
    if argument == "batch" and (payload := _payload_argument(function, name, len(more))) is not None:
        raise InvalidArgument(
            f"{name}{signature}: with batch=True a handler takes an EventBatch, not {name_of(payload.kind)}: leave out "
            "batch=True, or annotate it otherwise"
        )
    if signature is not None and (other := _other_kind(signature, argument)):
        repair = "add batch=True" if other == "batch" else "leave out batch=True"
        raise InvalidArgument(f"{name}{signature} takes {_ARTICLE[other]}: {repair}, or annotate it otherwise")


def _takes_transaction_first(handler: Any) -> bool:
    try:
        first = next(iter(_signature(handler).parameters.values()), None)
    except (TypeError, ValueError):
        return False  # functions in C may have no signature
    annotation = first.annotation if first is not None else ""
    name = annotation.rpartition(".")[2] if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return name == "Transaction"


def _refuse_transaction(handler: Any, name: str) -> None:
    """Raise InvalidArgument if the function has a parameter for a transaction. The type `Transaction` is in a higher
    package, so it is recognised by its name. So is a parameter `tx` after the first one."""
    try:
        signature = _signature(handler)
    except (TypeError, ValueError):
        return  # functions in C may have no signature
    for index, parameter in enumerate(signature.parameters.values()):
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        kind = parameter.annotation
        is_transaction = getattr(kind, "__name__", "") == "Transaction" and str(kind.__module__).startswith("headrace.")
        if is_transaction or (parameter.name == "tx" and index > 0 and kind is not Event):
            raise InvalidArgument(
                f"{name}{signature} takes a transaction, and the subscription has no effects: give it "
                f"effects=Effects(engine), or leave out `{parameter.name}`"
            )


def _check_arguments(function: Any, name: str, argument: str | None, *more: str) -> inspect.Signature | None:
    """Refuse a function that cannot be called with these arguments; if None, without arguments."""
    try:
        signature = _signature(function)
    except (TypeError, ValueError):
        return None  # functions in C may have no signature
    arguments = [] if argument is None else [argument, *more]
    try:
        signature.bind(*arguments)
    except TypeError:
        number = ("no arguments", "one argument, ", "two arguments, ")[len(arguments)]
        expected = number + " and ".join(arguments)
        raise InvalidArgument(f"{name}{signature} has the wrong arguments: expected {expected}") from None
    return signature


def _signature(function: Any) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except Exception:  # noqa: BLE001 (an annotation may be any expression)
        return inspect.signature(function)


def _other_kind(signature: inspect.Signature, argument: str | None) -> str | None:
    """Return "event" or "batch" if the function takes that instead of `argument`. Without an annotation, the name of
    the first argument decides."""
    if argument not in _ARTICLE:
        return None
    first = next(iter(signature.parameters.values()))
    annotation, kind = first.annotation, None
    if annotation is first.empty:
        kind = first.name
    elif isinstance(annotation, str):
        kind = _KINDS.get(annotation.rpartition(".")[2])
    elif isinstance(annotation, type):
        kind = "batch" if issubclass(annotation, EventBatch) else "event" if issubclass(annotation, Event) else None
    return kind if kind in _ARTICLE and kind != argument else None
