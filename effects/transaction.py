"""The transaction that a handler gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Executable, Result
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from ..streams.arguments import shown
from ..streams.clock import now_us
from ..streams.codecs import Codecs
from ..streams.errors import InvalidArgument, NotSupported
from ..streams.events import Event
from ..streams.identity import StreamId
from ..streams.subscriptions import check_provider_name
from ..streams.transactions import EffectScope
from .database import EffectTransaction
from .outbox_rows import Events, insert, rows_of
from .positions import NO_STATE, AppliedPosition, EncodedState
from .state import StreamState

P = ParamSpec("P")
R = TypeVar("R")

Parameters = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class HandlerState:
    """The state of one stream during one transaction."""

    def __init__(self, options: StreamState, known: AppliedPosition | None) -> None:
        self._options = options
        self._known = known
        self._encoded: EncodedState | None = None
        self._value: Any = None
        self._is_decoded = False

    @property
    def value(self) -> Any:
        """Raises the errors of `StreamState.decode`. A state that the handler does not read is not decoded."""
        if not self._is_decoded:
            known = self._known
            if known is not None:
                self._value = self._options.decode(known.state, known.state_version, known.expires_at_us, now_us())
            self._is_decoded = True
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        encoded = self._options.encode(value)
        if encoded is None:
            self._encoded = NO_STATE
        else:
            self._encoded = EncodedState(encoded, self._options.version, self._options.expires_at_us(now_us()))
        self._value, self._is_decoded = value, True

    def encoded(self) -> EncodedState:
        """Return the state to store: the stored one if the handler assigned none."""
        if self._encoded is not None:
            return self._encoded
        known = self._known
        return NO_STATE if known is None else EncodedState(known.state, known.state_version, known.expires_at_us)


class Transaction:
    """A transaction of the user's database in which one call of a handler works. headrace commits it when the handler
    returns, and rolls it back if the handler raises."""

    def __init__(
        self, opened: EffectTransaction, scope: EffectScope, state: HandlerState | None, events: Sequence[Event]
    ) -> None:
        self._opened = opened
        self._state = state
        self.events = events
        """The events whose effects are not committed yet."""
        self.subscription = scope.subscription
        self.generation = scope.generation
        self._provider = scope.provider

    async def execute(self, statement: Executable, parameters: Parameters | None = None) -> Result[Any]:
        """Execute a statement, and return its result with all rows. Raises the errors of SQLAlchemy."""
        return await self._opened.call(_execute, statement, parameters)

    async def run(self, function: Callable[Concatenate[Session, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `function(session, ...)`, called with an ORM session in this transaction: in a thread if the engine is
        an `Engine`, in a greenlet if it is an `AsyncEngine`. Raises InvalidArgument for an async function, and if the
        function returns an awaitable."""
        returned = await self._opened.call_session(function, *args, **kwargs)
        _refuse_awaitable(function, returned)
        return returned

    async def publish(
        self,
        stream: StreamId,
        events: Events,
        *,
        provider: str | None = None,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> None:
        """Publish to one stream when this transaction commits, through the outbox of the database. `provider` is the
        name of the provider; None: the one of the handler. A silo with the option `outbox` moves the events. Values are
        encoded as JSON: for another codec, use an `Outbox`.

        Raises InvalidArgument, PayloadTooLarge.
        """
        chosen = self._provider if provider is None else check_provider_name(provider)
        rows = rows_of(chosen, stream, events, Codecs(), delay=delay, priority=priority)
        await self._opened.call(insert, rows)

    @property
    def connection(self) -> AsyncConnection:
        """The connection. Do not commit or roll back. Raises NotSupported if the engine is no AsyncEngine."""
        return self._opened.connection

    @property
    def session(self) -> AsyncSession:
        """An ORM session in this transaction, flushed at its end. Raises NotSupported if the engine is no
        AsyncEngine."""
        return self._opened.session

    @property
    def state(self) -> Any:
        """The state of this stream; None if it has none. Assign a value to change it, None to delete it.

        Raises NotSupported without `Effects(state=...)`; when assigned, InvalidArgument for a value that cannot be
        encoded, and PayloadTooLarge.
        """
        return self._handler_state().value

    @state.setter
    def state(self, value: Any) -> None:
        self._handler_state().value = value

    def _handler_state(self) -> HandlerState:
        if self._state is None:
            raise NotSupported("tx.state is not kept: write Effects(engine, state=StreamState())")
        return self._state


def _execute(connection: Connection, statement: Executable, parameters: Parameters | None) -> Result[Any]:
    result = connection.execute(statement, parameters)
    return result.freeze()() if result.returns_rows else result


def _refuse_awaitable(function: object, returned: object) -> None:
    """Raise InvalidArgument if the body of `function` has not run: it is async, or a generator."""
    if not (inspect.isawaitable(returned) or inspect.isasyncgen(returned) or inspect.isgenerator(returned)):
        return
    if inspect.iscoroutine(returned):
        returned.close()  # otherwise Python warns that it was never awaited
    raise InvalidArgument(
        f"tx.run: {shown(function)} returned a {type(returned).__name__} instead of a result: write a plain "
        "function, without `async` and `yield`, or await it in the handler itself"
    )
