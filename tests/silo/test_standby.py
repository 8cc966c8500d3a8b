"""Several processes that serve the same subscriptions on one data directory: one serves, the others stand by.

Two providers of this process are as two processes here: each has files of its own, and the locks are of files.
`tests/frameworks` has real processes.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace import (
    Busy,
    DefinitionConflict,
    Event,
    Fenced,
    NotFound,
    OnFailure,
    Provider,
    RetryPolicy,
    StorageError,
    StreamId,
)
from headrace.agents import DeliveryService, HandlerService
from headrace.silo.standby import Standby
from headrace.silo.subscription_locks import SubscriptionLocks
from headrace.silo.views import SubscriptionView
from headrace.silo.why_gathering import explain_stream
from headrace.store.datadir import lock_subscription, open_data_directory
from headrace.streams.handlers import Handler
from headrace.streams.subscriptions import Selector, SubscriptionDefinition

PATIENCE_S = 60
STREAM = StreamId("orders", "42")
ONCE = RetryPolicy(max_attempts=1)


async def ignore(_: Event) -> None: ...


class Orders:
    """Keeps the payloads that it handles, and how the subscription ended for it."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.errors: list[Exception] = []
        self.is_completed = False

    async def on_next(self, event: Event) -> None:
        self.payloads.append(event.payload)

    async def on_error(self, error: Exception) -> None:
        self.errors.append(error)

    async def on_completed(self) -> None:
        self.is_completed = True


async def until(condition: Callable[[], object]) -> None:
    async def asked() -> object:
        return condition()

    await until_answered(asked)


async def until_answered(ask: Callable[[], Awaitable[object]]) -> None:
    """Ask until the answer is true."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await ask():
                return
            await asyncio.sleep(0.005)


def view(provider: Provider, name: str = "billing") -> SubscriptionView:
    return next(one for one in provider.statistics().subscriptions if one.name == name)


async def test_the_second_process_stands_by_and_takes_over(tmp_path: Path) -> None:
    first, second = Orders(), Orders()
    async with Provider.open(tmp_path) as standing_by:
        async with Provider.open(tmp_path) as serving:
            one = await serving.subscribe("billing", "orders/*", first)
            other = await standing_by.subscribe("billing", "orders/*", second)
            assert (one.stands_by, other.stands_by) == (False, True)
            await serving.publish(STREAM, b"1")
            await standing_by.publish(STREAM, b"2")
            await other.caught_up()
            assert (first.payloads, second.payloads) == ([b"1", b"2"], [])
        await standing_by.publish(STREAM, b"3")
        await until(lambda: second.payloads == [b"3"])
        assert not other.stands_by
        await other.caught_up()


async def test_another_definition_is_refused_while_the_first_one_is_served(tmp_path: Path) -> None:
    async with Provider.open(tmp_path) as serving, Provider.open(tmp_path) as other:
        await serving.subscribe("billing", "orders/*", Orders())
        with pytest.raises(DefinitionConflict, match="selector"):
            await other.subscribe("billing", "bills/*", Orders())
        assert not other.standby.waiting


async def test_a_process_stands_by_once_for_a_subscription(tmp_path: Path) -> None:
    async with Provider.open(tmp_path) as serving, Provider.open(tmp_path) as other:
        await serving.subscribe("billing", "orders/*", Orders())
        both = (other.subscribe("billing", "orders/*", Orders()) for _ in range(2))
        outcomes = await asyncio.gather(*both, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes].count(Busy) == 1
        with pytest.raises(Busy, match="by this process"):
            await other.subscribe("billing", "orders/*", Orders())


@pytest.mark.long
async def test_closed_while_it_stands_by_it_does_not_take_over(tmp_path: Path) -> None:
    closed, third = Orders(), Orders()
    async with Provider.open(tmp_path) as serving, Provider.open(tmp_path) as other:
        subscription = await serving.subscribe("billing", "orders/*", Orders())
        waiting = await other.subscribe("billing", "orders/*", closed)
        await waiting.close()
        assert closed.is_completed
        with pytest.raises(NotFound):
            await waiting.caught_up()
        await subscription.close()
        again = await other.subscribe("billing", "orders/*", third)  # nothing serves it
        assert not again.stands_by
        await other.publish(STREAM, b"1")
        await again.caught_up()
        assert (closed.payloads, third.payloads) == ([], [b"1"])


async def test_a_provider_that_is_closed_completes_its_standing_observers(tmp_path: Path) -> None:
    orders = Orders()
    async with Provider.open(tmp_path) as serving:
        await serving.subscribe("billing", "orders/*", Orders())
        async with Provider.open(tmp_path) as other:
            await other.subscribe("billing", "orders/*", orders)
        assert orders.is_completed


# ---- requests to a process that stands by --------------------------------------------------------------------------


async def test_a_seek_in_another_process_moves_the_one_that_serves(tmp_path: Path) -> None:
    orders = Orders()
    async with Provider.open(tmp_path) as serving, Provider.open(tmp_path) as other:
        served = await serving.subscribe("billing", "orders/*", orders)
        waiting = await other.subscribe("billing", "orders/*", Orders())
        await other.publish(STREAM, b"1")
        await served.caught_up()
        await waiting.seek("earliest")
        await until(lambda: orders.payloads == [b"1", b"1"])
        await other.publish(STREAM, b"2")
        await until(lambda: orders.payloads == [b"1", b"1", b"2"])
        assert (served.stands_by, waiting.stands_by, orders.errors) == (False, True, [])


async def test_closed_after_a_seek_elsewhere_it_is_not_served_again(tmp_path: Path) -> None:
    """It is closed while its process finds out where it is now."""
    closed, second = Orders(), Orders()
    async with Provider.open(tmp_path) as serving, Provider.open(tmp_path) as other:
        served = await serving.subscribe("billing", "orders/*", closed)
        waiting = await other.subscribe("billing", "orders/*", second)
        runner, answers = serving.manager.subscriptions, list[bool]()
        may_serve = runner.may_serve

        async def closed_meanwhile(name: str) -> bool:
            answers.append(await may_serve(name))
            if len(answers) == 1:
                await served.close()
            return answers[-1]

        runner.may_serve = closed_meanwhile
        await waiting.seek("earliest")
        await until(lambda: bool(answers) and not waiting.stands_by)
        assert answers == [True]
        await serving.publish(STREAM, b"1")
        await until(lambda: second.payloads == [b"1"])
        assert "billing" not in serving.manager.served
        assert closed.payloads == []


async def test_a_paused_stream_is_resumed_from_another_process(tmp_path: Path) -> None:
    attempts: list[bytes] = []

    async def fail_once(event: Event) -> None:
        attempts.append(event.payload)
        if len(attempts) == 1:
            raise ValueError("no such customer")

    options: dict[str, Any] = {"on_failure": OnFailure.PAUSE, "retry": ONCE}
    async with Provider.open(tmp_path) as serving, Provider.open(tmp_path) as other:
        await serving.subscribe("billing", "orders/*", fail_once, **options)
        waiting = await other.subscribe("billing", "orders/*", Orders(), **options)
        await other.publish(STREAM, [b"1", b"2"])
        await until_answered(lambda: waiting.resume(STREAM))
        await until(lambda: attempts == [b"1", b"1", b"2"])


async def test_a_dead_letter_is_redriven_from_another_process(tmp_path: Path) -> None:
    attempts: list[bytes] = []

    async def fail_once(event: Event) -> None:
        attempts.append(event.payload)
        if len(attempts) == 1:
            raise ValueError("no such customer")

    async with Provider.open(tmp_path) as serving, Provider.open(tmp_path) as other:
        await serving.subscribe("billing", "orders/*", fail_once, retry=ONCE)
        waiting = await other.subscribe("billing", "orders/*", Orders(), retry=ONCE)
        await other.publish(STREAM, b"1")
        await until_answered(waiting.redrive)
        await until(lambda: attempts == [b"1", b"1"])


@pytest.mark.long
async def test_deleted_in_one_process_it_ends_in_all(tmp_path: Path) -> None:
    serving_orders, other_orders, third_orders = Orders(), Orders(), Orders()
    async with (
        Provider.open(tmp_path) as serving,
        Provider.open(tmp_path) as other,
        Provider.open(tmp_path) as third,
    ):
        await serving.subscribe("billing", "orders/*", serving_orders)
        waiting = await other.subscribe("billing", "orders/*", other_orders)
        await third.subscribe("billing", "orders/*", third_orders)
        await waiting.delete()
        await until(lambda: serving_orders.errors and third_orders.errors)
        assert all(isinstance(error, Fenced) for error in (*serving_orders.errors, *third_orders.errors))
        assert other_orders.is_completed
        assert not serving.manager.served
        assert not third.standby.waiting
        with pytest.raises(NotFound):
            await third.subscription("billing")


async def test_a_process_that_serves_a_deleted_subscription_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Provider.open(tmp_path) as serving:
        await serving.subscribe("billing", "orders/*", Orders())
        with caplog.at_level(logging.INFO, "headrace.agents"):
            await serving.delete_subscription("billing")
    assert caplog.messages == ["subscription 'billing' was deleted: it is not served any more"]


async def test_made_anew_with_another_definition_the_old_handlers_do_not_get_its_events(tmp_path: Path) -> None:
    old, standing_by, new = Orders(), Orders(), Orders()
    async with (
        Provider.open(tmp_path) as serving,
        Provider.open(tmp_path) as other,
        Provider.open(tmp_path) as third,
    ):
        await serving.subscribe("billing", "orders/*", old)
        await third.subscribe("billing", "orders/*", standing_by)
        await other.delete_subscription("billing")
        await other.subscribe("billing", "bills/*", new)  # before the others have noticed
        await other.publish(StreamId("bills", "1"), b"bill")
        await until(lambda: old.errors and standing_by.errors and new.payloads == [b"bill"])
        await other.publish(STREAM, b"order")
        await other.caught_up("billing")
        assert (old.payloads, standing_by.payloads, new.payloads) == ([], [], [b"bill"])


# ---- consumers without a handler -----------------------------------------------------------------------------------


async def test_a_consumer_waits_while_another_process_consumes(tmp_path: Path) -> None:
    async with Provider.open(tmp_path) as standing_by, AsyncExitStack() as serving:
        provider = await serving.enter_async_context(Provider.open(tmp_path))
        consumer = await serving.enter_async_context(provider.subscribe("billing", "orders/*"))
        await standing_by.publish(STREAM, b"1")
        async with asyncio.timeout(PATIENCE_S):
            batch = await anext(aiter(consumer))
        assert batch.payloads() == [b"1"]
        await batch.ack()
        async with standing_by.subscribe("billing", "orders/*") as waiting, asyncio.timeout(PATIENCE_S):
            assert view(standing_by).state == "standing by"
            taking = asyncio.ensure_future(anext(aiter(waiting)))
            await serving.aclose()
            await standing_by.publish(STREAM, b"2")
            batch = await taking
            assert batch.payloads() == [b"2"]
            await batch.ack()


# ---- what is shown -------------------------------------------------------------------------------------------------


async def test_a_process_that_stands_by_shows_which_one_serves(tmp_path: Path) -> None:
    async with Provider.open(tmp_path) as serving, Provider.open(tmp_path) as other:
        await serving.subscribe("billing", "orders/*", Orders())
        await other.subscribe("billing", "orders/*", Orders())
        shown = view(other)
        assert shown.state == "standing by"
        assert "'billing' of provider 'default' is served by process" in shown.reason
        await other.publish(STREAM, b"1")
        await other.caught_up("billing")
        assert {queue.lag for queue in (await other.subscription("billing")).progress} == {0}
        (one,) = await explain_stream(other, STREAM, "billing")
        assert "nothing_pending" in [cause.code for cause in one.causes]


async def test_why_names_the_process_that_serves(tmp_path: Path) -> None:
    async with Provider.open(tmp_path) as serving, Provider.open(tmp_path) as other:

        async def never(_: Event) -> None:
            await asyncio.Event().wait()

        await serving.subscribe("billing", "orders/*", never)
        await other.subscribe("billing", "orders/*", never)
        await other.publish(STREAM, b"1")
        (one,) = await explain_stream(other, STREAM, "billing")
        assert one.causes[0].code == "standing_by"
        assert "served by process" in one.causes[0].evidence
        await serving.withdraw("billing", 0)


# ---- refusals and locks --------------------------------------------------------------------------------------------


async def test_queues_in_memory_cannot_be_taken_over(tmp_path: Path) -> None:
    async with (
        Provider.open(tmp_path, adapter="memory") as serving,
        Provider.open(tmp_path, adapter="memory") as other,
    ):
        await serving.subscribe("billing", "orders/*", Orders())
        with pytest.raises(Busy, match="choose a durable adapter"):
            await other.subscribe("billing", "orders/*", Orders())


async def test_a_process_whose_lock_file_is_gone_does_not_go_on_after_a_move(tmp_path: Path) -> None:
    """Another process may have locked the new file, and serve it."""
    orders, second = Orders(), Orders()
    async with Provider.open(tmp_path) as serving, Provider.open(tmp_path) as other:
        await serving.subscribe("billing", "orders/*", orders)
        await asyncio.to_thread((tmp_path / "locks" / "default" / "billing.lock").unlink)
        await other.subscribe("billing", "orders/*", second)
        await until(lambda: orders.errors)
        await serving.publish(STREAM, b"1")
        await until(lambda: second.payloads == [b"1"])
        assert orders.payloads == []


async def test_queues_with_one_reader_are_all_served_by_one_process(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(open_data_directory, tmp_path / "data")
    one, other = (SubscriptionLocks(directory, "default", shared=False, one_reader=True) for _ in range(2))
    await one.take("billing")
    with pytest.raises(Busy, match="one reader each"):
        await other.take("shipping")
    assert list(await other.take_free(["shipping"])) == ["shipping"]
    one.release("billing")
    assert list(await other.take_free(["billing"])) == ["billing"]  # it may still read the queues
    one.release_all()
    assert not await other.take_free(["billing", "shipping"])
    assert await other.holds("shipping")
    assert not await one.holds("billing")
    other.release_all()


async def test_a_cancelled_call_keeps_no_lock(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(open_data_directory, tmp_path / "data")
    locks = SubscriptionLocks(directory, "default", shared=False, one_reader=False)
    for _ in range(20):
        taking = asyncio.create_task(locks.take("billing"))
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        (await asyncio.to_thread(lock_subscription, directory, "default", "billing")).release()


FORK = """
import os, sys, time
from headrace.store.datadir import find_data_directory, lock_subscription
held = lock_subscription(find_data_directory(sys.argv[1]), "default", "billing")
if os.fork() == 0:
    print("forked", os.getpid(), flush=True)
    time.sleep(600)
sys.stdin.read()
"""


def test_a_forked_process_does_not_keep_the_lock_of_a_killed_one(tmp_path: Path) -> None:
    directory = open_data_directory(tmp_path / "data")
    command = [sys.executable, "-c", FORK, str(directory.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline().split()[1])
        try:
            with pytest.raises(Busy):
                lock_subscription(directory, "default", "billing")
            holder.kill()
            holder.wait()
            lock_subscription(directory, "default", "billing").release()
        finally:
            subprocess.run(["kill", "-9", str(child)], check=True)


async def test_a_takeover_that_fails_is_tried_again_and_delays_no_other(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(open_data_directory, tmp_path / "data")
    locks = SubscriptionLocks(directory, "default", shared=False, one_reader=False)
    tries: list[str] = []

    async def serve(definition: SubscriptionDefinition, _: DeliveryService) -> None:
        assert await locks.holds(definition.name)
        tries.append(definition.name)
        if tries.count("shipping") < 3 and definition.name == "shipping":
            raise StorageError("the store does not answer")

    names = ("billing", "shipping")
    definitions = [SubscriptionDefinition(name=name, selector=Selector("orders/*")) for name in names]

    async def stored() -> list[SubscriptionDefinition]:
        return definitions

    standby = Standby(locks, serve, stored, "default")
    for definition in definitions:
        standby.add(definition, HandlerService(Handler.of(ignore, batch=False), None, 1), "served by process 1")
    await until(lambda: not standby.waiting)
    assert sorted(tries) == ["billing", "shipping", "shipping", "shipping"]
    assert await locks.holds("billing")
    assert await locks.holds("shipping")
    assert await standby.aclose() == []
    locks.release_all()


async def test_a_close_that_is_cancelled_keeps_other_processes_out_until_the_handler_has_ended(tmp_path: Path) -> None:
    running, release, ended, second = asyncio.Event(), asyncio.Event(), list[str](), Orders()

    async def slow(event: Event) -> None:
        running.set()
        try:
            await release.wait()
        finally:
            ended.append("first")

    async with Provider.open(tmp_path) as serving, Provider.open(tmp_path) as other:
        await serving.subscribe("billing", "orders/*", slow)
        waiting = await other.subscribe("billing", "orders/*", second)
        await serving.publish(STREAM, b"1")
        await running.wait()
        closing = asyncio.create_task(serving.withdraw("billing"))
        await until(lambda: "billing" not in serving.manager.served)
        closing.cancel()
        await asyncio.wait([closing])
        directory = await asyncio.to_thread(open_data_directory, tmp_path)
        with pytest.raises(Busy):
            await asyncio.to_thread(lock_subscription, directory, "default", "billing")
        assert waiting.stands_by
        assert not ended
        release.set()
        await until(lambda: not waiting.stands_by)
        assert ended == ["first"]
        assert second.payloads == []


async def test_a_subscription_that_is_not_served_yet_is_not_unlocked_by_another_call(tmp_path: Path) -> None:
    async with Provider.open(tmp_path) as serving, Provider.open(tmp_path) as other:
        ensure = serving.ensure_subscription

        async def slowly(definition: SubscriptionDefinition) -> bool:
            with pytest.raises(NotFound):
                await serving.withdraw("billing")
            return await ensure(definition)

        serving.ensure_subscription = slowly  # type: ignore[method-assign]
        await serving.subscribe("billing", "orders/*", Orders())
        assert (await other.subscribe("billing", "orders/*", Orders())).stands_by
