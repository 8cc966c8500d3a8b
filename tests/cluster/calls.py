"""Calls between simulated processes: messages of each direction arrive in order, late, or never."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from headrace import HeadraceError, Unavailable
from headrace.client.transport import StreamCall, remote_error
from headrace.server.access import Principal
from headrace.server.methods import ServiceCall
from tests.cluster.machines import Machine

if TYPE_CHECKING:
    from tests.cluster.simulated import SimulatedCluster

WAIT_S = 0.2
"""Seconds after which a message to or from a silo that is cut off is tried again."""
Handler = Callable[[ServiceCall], Awaitable[None]]
UnaryHandler = Callable[[ServiceCall, bytes], Awaitable[bytes]]


def streamed(handler: UnaryHandler) -> Handler:
    """Return a handler of streams with one request and one response."""

    async def handle(call: ServiceCall) -> None:
        request = await call.read()
        if request is not None:
            await call.write(await handler(call, request))

    return handle


async def ask(call: "ClientCall", request: bytes, timeout_s: float | None) -> bytes:
    """Send the request of a unary call, and return its response. Raise Unavailable after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await call.send(request)
            answer = await call.receive()
    except TimeoutError:
        raise Unavailable(f"silo {call.address} did not answer within {timeout_s} s") from None
    finally:
        call.cancel()
    if answer is None:
        raise Unavailable(f"silo {call.address} ended the call without an answer")
    return answer


class Direction:
    """Messages from one process to another."""

    def __init__(self, connection: "Connection", to: Machine) -> None:
        self._connection = connection
        self._to = to
        self._under_way: deque[bytes | None] = deque()
        self._arrived: deque[bytes | None] = deque()
        self._last = 0.0
        self.news = asyncio.Event()
        """A message arrived, or the connection ended."""
        self.space = asyncio.Event()
        """The receiver has taken all messages, or the connection ended."""

    def send(self, message: bytes | None) -> None:
        """Send a message; None: no more follow."""
        world = self._connection.world
        self._under_way.append(message)
        self._last = max(self._last, world.now + self._connection.latency_s() * world.rng.random())
        world.call_at(self._last, self._arrives)

    def _arrives(self) -> None:
        """Called once for each message."""
        connection = self._connection
        if connection.is_broken:
            return
        if connection.is_cut_off():
            connection.world.call_at(connection.world.now + WAIT_S, self._arrives)
        else:
            self._to.call_soon(self._put, self._under_way.popleft())

    def _put(self, message: bytes | None) -> None:
        self._arrived.append(message)
        self.news.set()

    def take(self) -> Iterator[bytes | None]:
        """Yield the next message, if one has arrived."""
        if self._arrived:
            message = self._arrived.popleft()
            if not self._arrived:
                self.space.set()
            yield message

    @property
    def has_messages_under_way(self) -> bool:
        return bool(self._under_way)

    async def wait_for_space(self) -> None:
        """Return when few messages are under way or not taken."""
        while len(self._under_way) + len(self._arrived) > 1 and not self._connection.is_broken:
            self.space.clear()
            await self.space.wait()


class Connection:
    """A call of `client` to `silo`. `is_cut_off` says whether messages are held up."""

    def __init__(
        self,
        world: "SimulatedCluster",
        client: Machine,
        silo: Machine,
        is_cut_off: Callable[[], bool],
        latency_s: Callable[[], float],
        address: str,
    ) -> None:
        self.world = world
        self.client = client
        self.silo = silo
        self.is_cut_off = is_cut_off
        self.latency_s = latency_s
        self.address = address
        self.is_broken = False
        self.requests = Direction(self, silo)
        self.responses = Direction(self, client)
        self.ends_at: float | None = None
        """The caller's deadline, by the simulation's clock. None: it has none."""
        self.error: HeadraceError | None = None
        """The end of the call as the client sees it."""
        self.is_over = False
        self.handling: asyncio.Task[None] | None = None

    def begin(self, handler: Handler, principal: Principal, closing: asyncio.Event) -> None:
        """Let the call reach the silo, and handle it there."""
        call = SiloCall(self, principal, closing)
        delay_s = self.latency_s() * self.world.rng.random()

        def arrives() -> None:
            if self.is_broken or self.silo.gone:
                return
            if self.is_cut_off():
                self.world.later(WAIT_S, arrives)
            else:
                self.handling = self.silo.run(self._handle(handler, call), "call")

        self.world.later(delay_s, arrives)

    async def _handle(self, handler: Handler, call: ServiceCall) -> None:
        error: HeadraceError | None = None
        try:
            await handler(call)
        except HeadraceError as failure:
            error = remote_error(failure.code, str(failure)) or failure
        except asyncio.CancelledError:
            error = Unavailable("the call was cancelled")
        except Exception as failure:
            self.world.problem(f"{self.silo.name} failed in a call: {failure!r}")
            raise
        if not self.silo.gone:
            self.world.later(self.latency_s() * self.world.rng.random(), lambda: self._end_at_client(error))

    def _end_at_client(self, error: HeadraceError | None) -> None:
        """The end comes after all messages."""
        if self.responses_left:
            self.world.later(WAIT_S, lambda: self._end_at_client(error))
        else:
            self.client.call_soon(self._ended, error)

    @property
    def responses_left(self) -> bool:
        return self.responses.has_messages_under_way and not self.is_broken

    def _ended(self, error: HeadraceError | None) -> None:
        if not self.is_over:
            self.is_over, self.error = True, error
        for event in (self.responses.news, self.requests.space):
            event.set()

    def break_off(self, error: HeadraceError | None = None) -> None:
        """The connection is lost. Both sides see it, as soon as they run."""
        if self.is_broken:
            return
        self.is_broken = True
        self.client.call_soon(self._ended, error or Unavailable(f"the connection to {self.address} is lost"))
        if not self.silo.gone:
            self.silo.call_soon(self._cancel_handling)

    def _cancel_handling(self) -> None:
        for event in (self.requests.news, self.responses.space):
            event.set()
        if self.handling is not None:
            self.handling.cancel()


class SiloCall(ServiceCall):
    """The silo's side."""

    def __init__(self, connection: Connection, principal: Principal, closing: asyncio.Event) -> None:
        self.principal = principal
        self.peer = self.client = connection.client.name
        self.closing = closing
        self._connection = connection

    async def read(self) -> bytes | None:
        requests = self._connection.requests
        while True:
            for message in requests.take():
                return message
            if self._connection.is_broken:
                return None
            requests.news.clear()
            await requests.news.wait()

    async def write(self, message: bytes) -> None:
        responses = self._connection.responses
        responses.send(message)
        await responses.wait_for_space()
        if self._connection.is_broken:
            raise Unavailable("the caller is gone")

    def check_valid(self) -> None: ...

    def remaining_s(self) -> float | None:
        connection = self._connection
        return None if connection.ends_at is None else connection.ends_at - connection.world.now

    def hold(self, nbytes: int) -> None: ...

    def release(self, nbytes: int) -> None: ...


class ClientCall(StreamCall):
    """The caller's side."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def address(self) -> str:
        return self._connection.address

    def _check(self) -> None:
        if self._connection.is_over and self._connection.error is not None:
            raise self._connection.error

    async def send(self, message: bytes) -> None:
        self._check()
        self._connection.requests.send(message)
        await self._connection.requests.wait_for_space()

    async def done_sending(self) -> None:
        self._connection.requests.send(None)

    async def receive(self) -> bytes | None:
        responses = self._connection.responses
        while True:
            for message in responses.take():
                return message
            if self._connection.is_over:
                self._check()
                return None
            responses.news.clear()
            await responses.news.wait()

    def cancel(self) -> None:
        self._connection.break_off(Unavailable("the call was cancelled"))

    def leave(self) -> None: ...

    async def abandon(self) -> None:
        self.cancel()

    async def ended(self) -> None:
        while not self._connection.is_over:
            self._connection.responses.news.clear()
            await self._connection.responses.news.wait()
