"""The provider of a test: a real one, in the memory of this process, with faults and assertions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar, Unpack

from ..silo.opening import ProviderParts, open_parts
from ..silo.options import ProviderKeywords, ProviderOptions
from ..silo.provider import LocalSubscription
from ..streams.arguments import check_integer, check_options, check_seconds
from ..streams.errors import NotFound, StorageError
from ..streams.handlers import SubscriptionDeclaration, declared
from .deliveries import DeliveryHistory, since_start
from .faults import FaultyAdapter, HandlerFault, PublishFault
from .mirrored_store import MirroredStore
from .results import RecordedProvider
from .runner import VirtualTimeRunner, WaitsForeverError, check_no_running_loop

_T = TypeVar("_T")

WITHIN = timedelta(days=1)
"""Default time within which everything has to be handled."""
_REDRIVE_POLL_S = 1.0


class InjectedError(Exception):
    """The default error of a handler that is told to fail."""


class TestProvider(RecordedProvider):
    """A provider for one test. The fixture `headrace` is one. All times are virtual."""

    __test__ = False  # pytest would take it for a class of tests

    @classmethod
    async def open_for_test(cls, runner: VirtualTimeRunner, options: ProviderKeywords) -> TestProvider:
        """Open a provider with everything in memory, in the loop of a runner; the caller closes it. `options` as in
        `Provider.open`."""
        check_options("headrace_options", options, ProviderKeywords.__annotations__)
        chosen: ProviderKeywords = {"adapter": "memory", "options": {"rewindable": True}, "delays": "store"}
        parts = await open_parts(None, ProviderOptions(**(chosen | options)), stores=MirroredStore)
        history = DeliveryHistory(since_start(runner.loop))
        adapter = FaultyAdapter(parts.adapter, history)
        provider = cls(parts._replace(adapter=adapter), adapter, history, runner)
        runner.set_awaits_outside(lambda: provider.awaits_outside)
        if parts.options.outbox is not None:
            await provider.open_outbox(parts.options.outbox)
        provider.begin()
        return provider

    def __init__(
        self, parts: ProviderParts, adapter: FaultyAdapter, history: DeliveryHistory, runner: VirtualTimeRunner
    ) -> None:
        super().__init__(parts, history)
        self._faulty = adapter
        self._runner = runner
        self._waiting = False

    @property
    def awaits_outside(self) -> bool:
        """Whether the test or a handler may wait for a socket or a thread of its own."""
        return not self._waiting or self._handlers.running > 0

    # ---- serving ---------------------------------------------------------------------------------------------------

    async def serve_module(self, *modules: ModuleType) -> list[LocalSubscription]:
        """Serve the subscriptions that these modules declare with `@subscription`, as `headrace silo` does. Raises
        NotFound if a module declares none."""
        names = {module.__name__: 0 for module in modules}
        chosen = list[SubscriptionDeclaration]()
        for each in declared():
            module = getattr(each.handler, "__module__", None)
            if module in names:
                names[module] += 1
                chosen.append(each)
        if missing := [name for name, count in names.items() if not count]:
            raise NotFound(f"module {missing[0]} declares no subscription: write @subscription over a handler in it")
        return [await self.attach(each) for each in chosen]

    # ---- waiting ---------------------------------------------------------------------------------------------------

    async def settled(self, within: timedelta = WITHIN) -> None:
        """Return when every event is done in each subscription that is served here: it was handled, given up on, or
        waits in a paused stream. Time passes until retries, redrives and delayed events are due.

        Raises AssertionError, with the history, if that takes longer than `within`.
        """
        __tracebackhide__ = True
        self._waiting = True
        try:
            async with asyncio.timeout(within.total_seconds()):
                await self._settle()
        except TimeoutError:
            raise AssertionError(self._with_history(f"not everything is handled within {within}")) from None
        finally:
            self._waiting = False

    async def _settle(self) -> None:
        before: object = None
        while before != (before := await self._ends()):
            for name in list(self.manager.served):
                await self.wait_until_caught_up(name)
            while (wait_s := await self._due_in_s()) is not None:
                await asyncio.sleep(wait_s)
                before = None

    async def _ends(self) -> list[int]:
        return [(await self.adapter.bounds(queue)).next for queue in range(self.queues)]

    async def _due_in_s(self) -> float | None:
        """The time until delayed events or redrives may be due; None if there are none."""
        if await self.store.redrives(self.name, list(self.manager.served)):
            return _REDRIVE_POLL_S
        due_in_s = None if self.delays is None else await self.delays.store.due_in_s(self.name, "")
        return None if due_in_s is None else max(due_in_s, 0.001)

    def run(self, main: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the test's event loop. For tests that are plain functions. Raises WaitsForeverError,
        an AssertionError, if it waits for something that never happens."""
        __tracebackhide__ = True
        try:
            return self._runner.run(main)
        except WaitsForeverError as error:
            problem = str(error)
        raise WaitsForeverError(self._with_history(problem))

    # ---- faults ----------------------------------------------------------------------------------------------------

    async def redeliver(self, subscription: str) -> None:
        """Deliver all events of a subscription again that came since it began, or since the last call; return when they
        are done. This happens after a crash before the progress was saved. Running handlers are cancelled.

        Raises NotFound if the subscription is not served here.
        """
        served = self.manager.subscriptions.serving(subscription)
        deliveries = served.deliveries.items()
        now = {queue: delivery.progress.checkpoint() for queue, delivery in deliveries}
        await self.manager.subscriptions.restart(subscription, self._restarts_at[subscription])
        self._restarts_at[subscription] = now
        await self.settled()

    def fail_handler(
        self, subscription: str, times: int = 1, error: Exception | None = None, *, after: bool = False
    ) -> None:
        """Let the next deliveries to a subscription fail with `error`. `after`: the handler does its work first, so it
        has to bear that the event comes again. Raises InvalidArgument if the subscription was not served."""
        self._check_served(subscription)
        check_integer("times", times, 1)
        fault = HandlerFault(error or InjectedError("injected by the test"), after)
        self._handlers.fail(subscription, fault, times)

    def slow_handler(self, subscription: str, seconds: float) -> None:
        """Let each delivery to a subscription take so many seconds more. 0 ends this."""
        self._check_served(subscription)
        check_seconds("seconds", seconds)
        self._handlers.slow(subscription, seconds)

    def fail_publish(self, times: int = 1, error: Exception | None = None, *, stored: bool = False) -> None:
        """Let the next publishes fail with `error`, by default a StorageError. `stored`: the events are stored all the
        same, as if the answer was lost, so a program that publishes again publishes them twice."""
        check_integer("times", times, 1)
        fault = PublishFault(error or StorageError("injected by the test"), stored)
        self._faulty.faults.extend([fault] * times)


@contextmanager
def opened_provider(**options: Unpack[ProviderKeywords]) -> Generator[TestProvider]:
    """Open a `TestProvider` in an event loop of its own, in virtual time, for the length of a `with`. Its method `run`
    runs a test in that loop. The fixture `headrace` does this; other test frameworks call it themselves.

    Raises InvalidArgument for wrong options, and if an event loop runs in this thread.
    """
    check_no_running_loop()
    with VirtualTimeRunner() as runner, opened_in(runner, options) as provider:
        yield provider


@contextmanager
def opened_in(runner: VirtualTimeRunner, options: ProviderKeywords) -> Generator[TestProvider]:
    """Open a `TestProvider` in the event loop of a runner, for the length of a `with`."""
    provider = runner.run(TestProvider.open_for_test(runner, options))
    try:
        yield provider
    finally:
        runner.run(provider.aclose(0.0))
