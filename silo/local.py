"""Consuming batches from a provider in this process, as a client does from a silo: with credit and acknowledgements.

The client's code runs against the very services that a silo offers over gRPC; only the connection between them is
replaced. So both look and behave the same, and a consumer here is a member of its group beside those from elsewhere.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from ..streams.client.connection import Connection, StreamCall, remote_error
from ..streams.client.consuming import Consuming
from ..streams.errors import Closed, HeadraceError, Unavailable
from .access import EVERYTHING, Principal
from .consumers import Consumers
from .provider import Provider
from .rpc.consumer import ConsumerService
from .rpc.guard import Call, Kind, Method
from .rpc.subscriptions import SubscriptionService

TIMEOUT_S = 30.0
SESSION_TIMEOUT_S = 10.0


@asynccontextmanager
async def consuming(provider: Provider) -> AsyncGenerator[Consuming]:
    """What a client does to consume, for the length of an `async with`. Consumers that are open at its end are
    closed."""
    if provider.consumers is not None:
        async with _connected(provider, provider.consumers) as local:
            yield local
    else:
        async with Consumers.opened(provider, SESSION_TIMEOUT_S) as consumers:
            async with _connected(provider, consumers) as local:
                yield local


@asynccontextmanager
async def _connected(provider: Provider, consumers: Consumers) -> AsyncGenerator[Consuming]:
    providers, all_consumers = {provider.name: provider}, {provider.name: consumers}
    consuming = ConsumerService(providers, all_consumers, provider.relays)
    services = (consuming, SubscriptionService(providers, all_consumers))
    connection = LocalConnection([method for service in services for method in service.methods()])
    local = Consuming(connection, provider.name, TIMEOUT_S)
    try:
        yield local
    finally:
        await local.close_consumers()
        await connection.aclose()


class LocalConnection(Connection):
    """Calls to services in this process."""

    def __init__(self, methods: Sequence[Method], principal: Principal = EVERYTHING) -> None:
        self._principal = principal
        self._here: Mapping[str, Method] = {method.name.partition(".v1.")[2]: method for method in methods}
        self._closing = asyncio.Event()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._random = random.Random()  # noqa: S311 (spreads attempts)

    @property
    def address(self) -> str:
        return "this process"

    async def open(self, timeout_s: float) -> None: ...

    async def aclose(self) -> None:
        self._closed = True
        self._closing.set()

    async def unary(self, method: str, request: bytes, *, timeout_s: float | None) -> bytes:
        self._check_open()
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        call = LocalCall(self._closing, deadline, self._principal)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._here[method].handler(call, request)
        except TimeoutError:
            raise Unavailable(f"{method} did not end within {timeout_s:g} s") from None

    def stream(self, method: str) -> StreamCall:
        self._check_open()
        found = self._here[method]
        assert found.kind is Kind.STREAM
        return LocalStream(found.handler, LocalCall(self._closing, None, self._principal))

    def leave(self, index: int) -> None: ...

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the provider is closed")


class LocalCall(Call):
    """A call of this process's own: everything is allowed, nothing is limited."""

    __slots__ = ("_deadline", "_requests", "_responses", "requested", "responded", "taken")

    def __init__(self, closing: asyncio.Event, deadline: float | None, principal: Principal = EVERYTHING) -> None:
        self.principal = principal
        self.peer = "this process"
        self.closing = closing
        self._deadline = deadline
        self._requests: deque[bytes | None] = deque()
        self._responses: deque[bytes] = deque()
        self.requested = asyncio.Event()
        self.responded = asyncio.Event()
        self.taken = asyncio.Event()

    async def read(self) -> bytes | None:
        while not self._requests:
            self.requested.clear()
            await self.requested.wait()
        return self._requests.popleft()

    async def write(self, message: bytes) -> None:
        self._responses.append(message)
        self.responded.set()
        while len(self._responses) > 1:
            self.taken.clear()
            await self.taken.wait()

    def request(self, message: bytes | None) -> None:
        """Put what the consumer says; None: nothing more."""
        self._requests.append(message)
        self.requested.set()

    def response(self) -> bytes | None:
        """Take what the service says; None where it says nothing at present."""
        if not self._responses:
            return None
        self.taken.set()
        return self._responses.popleft()

    def check_valid(self) -> None: ...

    def remaining_s(self) -> float | None:
        return None if self._deadline is None else self._deadline - asyncio.get_running_loop().time()

    def hold(self, nbytes: int) -> None: ...

    def release(self, nbytes: int) -> None: ...

    def end(self) -> None: ...


class LocalStream(StreamCall):
    """The consumer's side of a stream."""

    def __init__(self, handler: Callable[[Call], Awaitable[None]], call: LocalCall) -> None:
        self._local = call
        self._task = asyncio.ensure_future(handler(call))
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._local.responded.set()
        if not task.cancelled():
            task.exception()  # `receive` raises it, if anybody asks

    async def send(self, message: bytes) -> None:
        if self._task.done():
            self._raise()
        self._local.request(message)

    async def receive(self) -> bytes | None:
        while (message := self._local.response()) is None:
            if self._task.done():
                self._raise()
                return None
            self._local.responded.clear()
            await self._local.responded.wait()
        return message

    def _raise(self) -> None:
        """Why the call ended, where not in order."""
        if self._task.cancelled():
            raise Unavailable("the call was cancelled")
        error = self._task.exception()
        if isinstance(error, HeadraceError):
            raise remote_error(error.code, str(error)) or error
        if error is not None:
            raise error

    async def done_sending(self) -> None:
        self._local.request(None)

    def cancel(self) -> None:
        self._task.cancel()

    def leave(self) -> None: ...

    async def ended(self) -> None:
        await asyncio.wait([self._task])
