"""Transports, by which a client calls services: their protocol, and the retries that they share.

There are two transports: gRPC (`GrpcTransport` in `client/connection.py`), and services of the same process
(`InProcessTransport` in `silo/in_process.py`). Requests and responses are encoded bytes. A method is named
`Service/Method`, as in "PublisherService/Publish".
"""

from __future__ import annotations

import asyncio
import random
from typing import Protocol

from ..streams.backoff import Backoff
from ..streams.errors import Closed, HeadraceError, InvalidArgument, NotSupported, Unavailable, error_of

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
"""Shortest and longest pause between two attempts to reach a silo, in seconds."""


class StreamCall(Protocol):
    """A bidirectional call. Only one `send` and one `receive` may run at a time.

    Both raise the HeadraceError that ended the call. Cancelling one of them cancels the call.
    """

    @property
    def address(self) -> str:
        """Address of the silo that it goes to."""
        ...

    async def send(self, message: bytes) -> None:
        """Return when the transport has accepted the message. It does so as long as the other side reads."""

    async def done_sending(self) -> None:
        """Tell the other side that no more messages follow."""

    async def receive(self) -> bytes | None:
        """Return the next message; None if the silo has ended the call in order."""

    def cancel(self) -> None:
        """End the call at once. Idempotent. A waiting `receive` or `send` raises Unavailable, or Closed."""

    def leave(self) -> None:
        """Send the next call to another address, if there is one, because the silo has announced that it ends this
        call."""

    async def abandon(self) -> None:
        """End the call of a silo that is silent: its connection may be dead. Later calls get another connection,
        possibly to another address."""

    async def ended(self) -> None:
        """Return when the call is over."""


class Transport(Protocol):
    """Calls to the services of silos, with the permissions of one caller. Belongs to one event loop.

    Implementations inherit `call` and `long_call`.
    """

    is_remote: bool = False
    """Whether silos at other addresses can be called, by `at`."""

    @property
    def address(self) -> str:
        """Address of the next call."""
        ...

    def at(self, address: str) -> Transport:
        """Return a transport to the silo at this address, with the same permissions. It is shared, and closed with this
        one. Raise InvalidArgument if the address is not valid, or would get a token unencrypted."""
        raise NotSupported(f"a silo at {address} cannot be called over a connection within a process")

    async def aclose(self) -> None:
        """End all calls. Idempotent; afterwards every call raises Closed."""

    def check_loop(self) -> None:
        """Raise InvalidArgument if the transport is open and belongs to another event loop."""

    def check_open(self) -> None:
        """Raise Closed if the transport is not open. Raise InvalidArgument as `check_loop` does."""

    async def ready(self, timeout_s: float) -> None:
        """Return when a silo answers and accepts the caller.

        Raise Unavailable after `timeout_s`, and Unauthenticated if the silo refuses the caller.
        """

    async def unary(self, method: str, request: bytes, *, timeout_s: float | None) -> bytes:
        """Call a method once. Raise a HeadraceError; Unavailable if no answer comes within `timeout_s`."""
        ...

    def stream(self, method: str) -> StreamCall:
        """Begin a bidirectional call. The first `receive` raises if it fails."""
        ...

    async def call(
        self, method: str, request: bytes, *, timeout_s: float, done: type[HeadraceError] | None = None
    ) -> bytes:
        """Call an idempotent method. Retry after a retryable failure, for at most `timeout_s` seconds.

        If the time ends during an attempt that began in the second half of it, raise the failure of the attempt before:
        that one says the reason.

        An attempt may succeed although its answer is lost. The next attempt may then fail with `done`: this counts as
        success, with an empty response.
        """
        now, backoff = asyncio.get_running_loop().time, reconnect_backoff()
        end = now() + timeout_s
        before: HeadraceError | None = None
        while True:
            began = now()
            try:
                return await self.unary(method, request, timeout_s=max(0.001, end - began))
            except HeadraceError as error:
                if before is not None and done is not None and isinstance(error, done):
                    return b""
                if not error.retryable:
                    raise
                pause = backoff.next_s()
                if now() + pause >= end:
                    cut_short = now() >= end and end - began < timeout_s / 2
                    raise before if before is not None and cut_short else error from None
                before = error
            await asyncio.sleep(pause)

    async def long_call(self, method: str, request: bytes, *, outage_s: float) -> bytes:
        """Call a method without a time limit, again after each outage. Raise Unavailable if an outage lasts longer than
        `outage_s`."""
        backoff = reconnect_backoff()
        while True:
            try:
                return await self.unary(method, request, timeout_s=None)
            except HeadraceError as error:
                if not error.retryable:
                    raise
            await asyncio.sleep(backoff.next_s())
            await self.ready(outage_s)


def reconnect_backoff() -> Backoff:
    """Return the pauses between attempts to reach a silo. They never end: the caller has its own time limit."""
    return Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, rng=random.SystemRandom())


def require_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Raise InvalidArgument if the running event loop is another one than `loop`."""
    if asyncio.get_running_loop() is not loop:
        raise InvalidArgument(
            "a client belongs to the event loop that opened it: open another one in this loop, or use SyncClient, "
            "which may be called from anywhere"
        )


def remote_error(code: str, message: str) -> HeadraceError | None:
    """The error that a silo raised; None for a code that this version does not know. `Closed` becomes Unavailable: the
    silo's object is closed, not the client's."""
    error = error_of(code, message)
    return Unavailable(message) if isinstance(error, Closed) else error
