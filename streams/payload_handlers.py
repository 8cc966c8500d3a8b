"""Handlers that take the value of a payload, not the event: `async def billing(order: Order)`.

The annotation of the first argument decides. Such a handler may take the event, too, as its second argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar, get_args

from .codecs import Codecs, name_of
from .errors import InvalidArgument
from .events import Event, EventBatch

_EVENTS = ("Event", "EventBatch", "ReceivedBatch")
"""Type names in annotations that cannot be evaluated, because they are imported for type checkers only."""


class PayloadArgument(NamedTuple):
    """The arguments of a handler of values."""

    kind: Any
    """Type of the value."""
    takes_event: bool
    """Whether the handler takes the event as its second argument."""

    def decoding(self, handler: Callable[..., Awaitable[None]], codecs: Codecs) -> Callable[..., Awaitable[None]]:
        """Return a handler of events that calls `handler` with the value, and with the transaction if there is one.

        Raises InvalidArgument if the codecs cannot decode the type.
        """
        decode = codecs.decoder(self.kind)

        def with_value(event: Event, *tx: Any) -> Awaitable[None]:
            return handler(decode(event), *tx)

        def with_value_and_event(event: Event, *tx: Any) -> Awaitable[None]:
            return handler(decode(event), event, *tx)

        return with_value_and_event if self.takes_event else with_value


def payload_argument(signature: inspect.Signature, name: str, transactions: int) -> PayloadArgument | None:
    """Return how a function takes values, None if it takes events or batches.

    `transactions` is 1 if it takes a transaction after them, else 0. Raises InvalidArgument if the type of the first
    argument cannot be found out, or if the function has the wrong arguments.
    """
    parameters = list(signature.parameters.values())
    if not parameters or not _is_payload(parameters[0].annotation, f"{name}{signature}"):
        return None
    kind = parameters[0].annotation
    if _fits(signature, 2 + transactions) and _is_event(parameters[1]):
        return PayloadArgument(kind, takes_event=True)
    if _fits(signature, 1 + transactions):
        return PayloadArgument(kind, takes_event=False)
    more = " and tx" if transactions else ""
    raise InvalidArgument(
        f"{name}{signature} has the wrong arguments: expected {name_of(kind)}{more}, or {name_of(kind)}, event{more}"
    )


def _is_event(parameter: inspect.Parameter) -> bool:
    return parameter.annotation is Event or parameter.name == "event"


def _fits(signature: inspect.Signature, number: int) -> bool:
    try:
        signature.bind(*range(number))
    except TypeError:
        return False
    return True


def _is_payload(annotation: Any, where: str) -> bool:
    if annotation is inspect.Parameter.empty or annotation in (Any, object) or isinstance(annotation, TypeVar):
        return False
    if isinstance(annotation, str):
        if any(name in annotation for name in _EVENTS) or annotation.rpartition(".")[2] in ("Any", "object"):
            return False
        raise InvalidArgument(
            f"{where}: the type {annotation!r} is not known when the handler is declared: define or import it at the "
            "top of the module, and not only for type checkers"
        )
    kinds: list[type[Any]] = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type)]
    return not any(issubclass(each, (Event, EventBatch)) or getattr(each, "_is_protocol", False) for each in kinds)
