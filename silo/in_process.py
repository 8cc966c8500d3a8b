"""Calls of services in this process, without a network: the transport, and both sides of a call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ..client.transport import StreamCall, Transport, remote_error, require_loop
from ..server.access import EVERYTHING, Principal
from ..server.methods import MethodKind, ServiceCall, ServiceMethod
from ..streams.errors import Closed, HeadraceError, Unavailable

THIS_PROCESS = "this process"


class InProcessTransport(Transport):
    """Calls to services in this process."""

    def __init__(self, methods: Sequence[ServiceMethod], principal: Principal = EVERYTHING) -> None:
        self._principal = principal
        self._methods: Mapping[str, ServiceMethod] = {method.name.partition(".v1.")[2]: method for method in methods}
        self._closing = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def address(self) -> str:
        return THIS_PROCESS

    async def aclose(self) -> None:
        self._closing.set()

    def check_loop(self) -> None:
        if not self._closing.is_set():
            require_loop(self._loop)

    def check_open(self) -> None:
        if self._closing.is_set():
            raise Closed("the provider is closed")
        self.check_loop()

    async def ready(self, timeout_s: float) -> None: ...

    async def unary(self, method: str, request: bytes, *, timeout_s: float | None) -> bytes:
        self.check_open()
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        call = InProcessCall(self._closing, deadline, self._principal)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._methods[method].handler(call, request)
        except TimeoutError:
            raise Unavailable(f"{method} did not end within {timeout_s:g} s") from None

    def stream(self, method: str) -> InProcessStreamCall:
        self.check_open()
        found = self._methods[method]
        assert found.kind is MethodKind.STREAM
        return InProcessStreamCall(found.handler, InProcessCall(self._closing, None, self._principal))


class InProcessCall(ServiceCall):
    """The service's side of a call within this process, without limits."""

    def __init__(
        self,
        closing: asyncio.Event,
        deadline: float | None,
        principal: Principal = EVERYTHING,
        *,
        peer: str = THIS_PROCESS,
    ) -> None:
        self.principal = principal
        self.peer = self.client = peer
        self.closing = closing
        self._deadline = deadline
        self._requests: deque[bytes | None] = deque()
        self._responses: deque[bytes] = deque()
        self.requested = asyncio.Event()
        self.responded = asyncio.Event()
        self.response_taken = asyncio.Event()

    async def read(self) -> bytes | None:
        while not self._requests:
            self.requested.clear()
            await self.requested.wait()
        return self._requests.popleft()

    async def write(self, message: bytes) -> None:
        self._responses.append(message)
        self.responded.set()
        while len(self._responses) > 1:
            self.response_taken.clear()
            await self.response_taken.wait()

    def request(self, message: bytes | None) -> None:
        """Pass a message of the consumer to the service; None: no more follow."""
        self._requests.append(message)
        self.requested.set()

    def response(self) -> bytes | None:
        """Take the next message of the service; None if there is none at present."""
        if not self._responses:
            return None
        self.response_taken.set()
        return self._responses.popleft()

    def check_valid(self) -> None: ...

    def remaining_s(self) -> float | None:
        return None if self._deadline is None else self._deadline - asyncio.get_running_loop().time()

    def hold(self, nbytes: int) -> None: ...

    def release(self, nbytes: int) -> None: ...


class InProcessStreamCall(StreamCall):
    """The caller's side of a bidirectional call."""

    def __init__(self, handler: Callable[[ServiceCall], Awaitable[None]], call: InProcessCall) -> None:
        self._local = call
        self._task = asyncio.ensure_future(handler(call))
        self._task.add_done_callback(self._ended)

    @property
    def address(self) -> str:
        return THIS_PROCESS

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._local.responded.set()
        if not task.cancelled():
            task.exception()  # mark it as seen: `receive` raises it

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
        """Raise the error with which the call ended, if any."""
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

    async def abandon(self) -> None:
        self.cancel()

    async def ended(self) -> None:
        await asyncio.wait([self._task])
