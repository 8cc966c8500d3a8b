"""The client for programs without asyncio: the same calls, which block until they are done.

with SyncClient("127.0.0.1:9465") as client:
    client.stream("orders", "42").publish(b"paid")
    with client.subscribe("printer", "orders/*") as consumer:
        for batch in consumer:
            ...
            batch.ack()

All clients of a process share one thread, in which an event loop runs. They may be used from any thread, and from
several threads at a time. Events that several threads publish at the same time share a request.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, ParamSpec, Self, TypeVar, Unpack, cast

from ..streams.arguments import check_call, check_methods, check_options
from ..streams.codecs import Publishable
from ..streams.errors import Closed, InvalidArgument
from ..streams.identity import SequenceToken, StreamId
from ..streams.publishing import ProducerSequence, Receipt
from ..streams.subscriptions import DeadLetter, GapRecord, Start, SubscriptionDefinition
from .blocking_consumer import SyncConsumer, SyncPulled
from .client import Client
from .management import SubscriptionState
from .options import ClientOptions, ConsumerOptions
from .pulled import Pulled
from .stream_provider import SyncStreamProvider

_P = ParamSpec("_P")
_T = TypeVar("_T")


class LoopThread:
    """A thread with an event loop. It ends when its last user releases it. Calls that are open then raise Closed."""

    _shared: LoopThread | None = None
    _users = 0
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.ending = False
        """Whether it begins no more calls."""
        self._calls: set[_LoopCall[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="headrace client", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> LoopThread:
        """Return the thread of this process. Call `release` when it is no longer needed."""
        with cls._lock:
            if cls._shared is None or cls._shared.forked:
                cls._shared, cls._users = LoopThread(), 0
            cls._users += 1
            return cls._shared

    def release(self) -> None:
        """End the use of the thread. It ends with its last user."""
        if self.forked:
            return
        with self._lock:
            LoopThread._users -= 1
            if LoopThread._users:
                return
            LoopThread._shared = None
        self.ending = True
        self._call_soon(self._loop.stop)
        self._thread.join()

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the process that has the thread."""
        return self._process != os.getpid()

    def check_caller(self) -> None:
        """Raise InvalidArgument if the caller runs in this thread."""
        if threading.current_thread() is self._thread:
            raise InvalidArgument(
                "a SyncClient cannot be called in its own thread, as the call would wait for itself: call it elsewhere"
            )

    def call(self, function: Callable[_P, Awaitable[_T]], *args: _P.args, **options: _P.kwargs) -> _T:
        """Call an async function in the thread, and return its result. If the caller is interrupted, as by Ctrl-C, the
        function is cancelled. Raises Closed if the thread ends first."""
        if self.forked:
            raise Closed(
                "a client does not survive fork: start processes with spawn, or fork before the first client is opened"
            )
        self.check_caller()
        call = _LoopCall(self, functools.partial(function, *args, **options))
        try:
            self._begin(call)
            return call.outcome.result()
        except BaseException:
            self._call_soon(call.cancel)
            raise
        finally:
            self._calls.discard(call)

    def _begin(self, call: _LoopCall[Any]) -> None:
        """It takes no lock: a signal handler may end the thread at any point of it, and wait for the end. It adds the
        call before it reads `ending`, and `_run` sets `ending` before it closes the calls that are left."""
        self._calls.add(call)
        if self.ending:
            raise Closed("the client is closed")
        self._call_soon(call.begin)

    def _call_soon(self, callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            while left := asyncio.all_tasks(self._loop):  # tasks that end may create others
                for task in left:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self.ending = True
            self._loop.close()
            for call in list(self._calls):
                call.close()


class _LoopCall(Generic[_T]):
    """A call in the loop of another thread. It replaces `asyncio.run_coroutine_threadsafe`, which Ctrl-C cannot
    interrupt early enough.

    The end of the thread cancels its task, or comes before the task begins. Then `close` sets the outcome.
    """

    def __init__(self, thread: LoopThread, function: Callable[[], Awaitable[_T]]) -> None:
        self.outcome: Future[_T] = Future()
        self._thread = thread
        self._function = function
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="headrace call")

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Raise Closed to the caller if there is no outcome."""
        if not self.outcome.done():
            self.outcome.set_exception(Closed("the client was closed during the call, which may have taken effect"))

    async def _run(self) -> None:
        try:
            self.outcome.set_result(await self._function())
        except asyncio.CancelledError:
            if not self._thread.ending:
                self.outcome.cancel()
        except BaseException as error:  # noqa: BLE001 (the caller gets it)
            self.outcome.set_exception(error)


class SyncStream:
    """A handle on one stream: see `headrace.Stream`."""

    __slots__ = ("_client", "id")

    def __init__(self, id: StreamId, client: SyncClient) -> None:  # noqa: A002 (the word of the field)
        self.id = id
        self._client = client

    @check_call
    def publish(
        self,
        events: Publishable | Iterable[Publishable],
        *,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> SequenceToken:
        """Publish one event or several, in order: see `Stream.publish`."""
        return self._client.publish(self.id, events, delay=delay, priority=priority)

    def __repr__(self) -> str:
        return f"SyncStream({self.id!s})"


@check_methods(SyncStreamProvider)
class SyncClient:
    """A provider of a silo, over gRPC, for threads. Open it with `with`. Its methods are documented in `Client`.

    It does not survive `os.fork`. A process that was forked after a client was opened can open no client.
    """

    @check_call
    def __init__(self, address: str, **options: Unpack[ClientOptions]) -> None:
        """`options` are those of `Client`. Raises InvalidArgument."""
        check_options("SyncClient", options, ClientOptions.__annotations__)
        self._client = Client(address, **options)
        self._thread: LoopThread | None = None
        self._thread_lock = threading.RLock()  # reentrant: a signal handler may close the client

    def __enter__(self) -> Self:
        with self._thread_lock:
            if self._thread is not None:
                raise InvalidArgument("the client is open already: enter it once, all threads may use it")
            self._thread = LoopThread.acquire()
        try:
            self._call(self._client.__aenter__)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the events that other threads are publishing, as long as these would wait, and close. Idempotent.

        Other calls that are open end, or raise Closed; iterating over a consumer ends."""
        if (thread := self._thread) is None:
            return
        thread.check_caller()
        try:
            with suppress(Closed):  # another thread closes it too, or this process was forked
                thread.call(self._client.aclose)
        finally:
            self._release()

    # ---- publishing ------------------------------------------------------------------------------------------------

    def stream(self, namespace: str | StreamId, key: str | None = None) -> SyncStream:
        """A handle on a stream, by namespace and key or by id."""
        return SyncStream(self._client.stream(namespace, key).id, self)

    def publish(
        self,
        stream: StreamId,
        events: Publishable | Iterable[Publishable],
        *,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> SequenceToken:
        return self._call(self._client.publish, stream, events, delay=delay, priority=priority)

    def publish_many(
        self, items: Iterable[tuple[StreamId, Publishable]], *, sequence: ProducerSequence | None = None
    ) -> Sequence[Receipt]:
        return self._call(self._client.publish_many, items, sequence=sequence)

    def last_sequence(self, producer: str) -> int:
        return self._call(self._client.last_sequence, producer)

    def flush(self) -> None:
        self._call(self._client.flush)

    # ---- subscriptions ---------------------------------------------------------------------------------------------

    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None = None,
        handler: None = None,
        **options: Unpack[ConsumerOptions],
    ) -> SyncConsumer:
        """Consume the durable subscription `name`: `with client.subscribe(...) as consumer: for batch in consumer`.

        `options` are those of `Client.subscribe` without a handler. A handler is refused, because it would be async.
        The functions `on_state` and `on_gap` are called in the client's thread, and must not call the client.
        """
        if cast("object", handler) is not None or not {"batch", "concurrency"}.isdisjoint(options):
            raise InvalidArgument("a SyncClient has no handlers: iterate over the consumer, or use Client")
        return SyncConsumer(self._client.subscribe(name, selector, **options), self._call)

    def pull(
        self,
        name: str,
        consumer: str,
        *,
        max_events: int = 0,
        max_bytes: int = 0,
        wait_s: float = 0.0,
        session_timeout_s: float | None = None,
        after: SyncPulled | None = None,
    ) -> SyncPulled:
        pulled = self._call(
            self._client.pull,
            name,
            consumer,
            max_events=max_events,
            max_bytes=max_bytes,
            wait_s=wait_s,
            session_timeout_s=session_timeout_s,
            after=None if after is None else _pulled(after),
        )
        return SyncPulled(pulled, self._call)

    def acknowledge(self, pulled: SyncPulled) -> int:
        return self._call(self._client.acknowledge, _pulled(pulled))

    def create_subscription(self, definition: SubscriptionDefinition) -> bool:
        return self._call(self._client.create_subscription, definition)

    def subscription(self, name: str) -> SubscriptionState:
        return self._call(self._client.subscription, name)

    def subscriptions(self) -> list[SubscriptionDefinition]:
        return self._call(self._client.subscriptions)

    def delete_subscription(self, name: str) -> None:
        self._call(self._client.delete_subscription, name)

    def seek(self, name: str, start: Start | str) -> int:
        return self._call(self._client.seek, name, start)

    def caught_up(self, name: str) -> None:
        self._call(self._client.caught_up, name)

    def resume(self, name: str, stream: StreamId) -> bool:
        return self._call(self._client.resume, name, stream)

    def dead_letters(self, subscription: str | None = None, *, limit: int = 100, after_id: int = 0) -> list[DeadLetter]:
        return self._call(self._client.dead_letters, subscription, limit=limit, after_id=after_id)

    def redrive(self, subscription: str, ids: Sequence[int] | None = None) -> int:
        return self._call(self._client.redrive, subscription, ids)

    def delete_dead_letters(self, subscription: str, ids: Sequence[int] | None = None) -> int:
        return self._call(self._client.delete_dead_letters, subscription, ids)

    def gaps(self, subscription: str) -> list[GapRecord]:
        return self._call(self._client.gaps, subscription)

    def _call(self, function: Callable[_P, Awaitable[_T]], *args: _P.args, **options: _P.kwargs) -> _T:
        if (thread := self._thread) is None:
            raise Closed("the client is not open: use it in a `with` block")
        return thread.call(function, *args, **options)

    def _release(self) -> None:
        with self._thread_lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.release()


def _pulled(pulled: SyncPulled) -> Pulled:
    """Return the `Pulled` inside. Other objects are returned as they are, and the client refuses them."""
    return getattr(pulled, "pulled", cast("Pulled", pulled))
