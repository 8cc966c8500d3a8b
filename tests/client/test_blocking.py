"""The client for threads without asyncio."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from inspect import signature
from typing import ParamSpec, TypeVar

import pytest

from headrace import (
    Client,
    Closed,
    Consumer,
    HeadraceError,
    InvalidArgument,
    NotFound,
    PayloadTooLarge,
    Selector,
    SessionState,
    StreamId,
    SubscriptionDefinition,
    SyncConsumer,
    Unavailable,
)
from headrace.client.blocking import LoopThread, SyncClient
from tests.client.silos import SiloProcess, stored

S = StreamId("n", "k")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def test_events_are_stored_when_publish_returns(silo: SiloProcess):
    with SyncClient(silo.address) as client:
        first = client.stream("n", "k").publish(b"0")
        assert first < client.publish(S, [b"1", b"2"])
        assert [receipt.duplicate for receipt in client.publish_many([(S, b"3")])] == [False]
        client.flush()
        with pytest.raises(PayloadTooLarge):
            client.publish(S, bytes(2 << 20))
    silo.stop()
    assert asyncio.run(stored(silo.data)) == {S: [b"0", b"1", b"2", b"3"]}


def test_subscriptions_are_managed(silo: SiloProcess):
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"))
    with SyncClient(silo.address) as client:
        assert client.create_subscription(definition)
        assert client.subscriptions() == [definition]
        assert client.subscription("s").definition == definition
        client.publish(S, b"0")
        client.seek("s", "latest")
        client.caught_up("s")
        assert (client.dead_letters("s"), client.gaps("s"), client.redrive("s"), client.resume("s", S)) == (
            [], [], 0, False
        )  # fmt: skip
        assert client.delete_dead_letters("s") == 0
        client.delete_subscription("s")
        with pytest.raises(NotFound):
            client.subscription("s")


def test_batches_are_taken_and_acknowledged(silo: SiloProcess):
    with SyncClient(silo.address) as client:
        with client.subscribe("s", "n/*") as consumer:
            assert consumer.take(0) is None
            client.publish(S, [b"0", b"1"])
            client.publish(S, b"2")
            for batch in consumer:
                assert (batch.stream, batch.attempt, batch.redriven, batch.token.index) == (S, 1, False, 0)
                assert [event.payload for event in batch] == batch.payloads() == [b"0", b"1"]
                assert len(batch) == 2
                batch.ack(batch.events()[0])
                batch.nack("not yet", delay=timedelta(0))
                break
            again = consumer.take(30)
            assert again is not None
            assert (again.payloads(), again.attempt) == ([b"1"], 2)
            again.ack()
            last = next(consumer)
            last.ack_until(last.events()[-1])
            with pytest.raises(InvalidArgument):
                last.ack(again.token)
            consumer.saved()
            consumer.caught_up()
            assert (consumer.name, consumer.definition) == ("s", client.subscription("s").definition)
            assert (consumer.gaps, consumer.assignment) == ([], None)
            assert consumer.id in repr(client.subscription("s").consumers)
        assert consumer.take(1) is None
        assert list(consumer) == []
        with pytest.raises(Closed):
            last.ack()
        assert all(queue.lag == 0 for queue in client.subscription("s").progress)


class InterruptedCalls:
    """Calls in the client's thread that are interrupted when their result is there, as by Ctrl-C, if `interrupts` says
    so."""

    def __init__(self, thread: LoopThread) -> None:
        self.interrupts = 0
        self._thread = thread

    def __call__(self, function: Callable[_P, Awaitable[_T]], *args: _P.args, **options: _P.kwargs) -> _T:
        result = self._thread.call(function, *args, **options)
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return result


def test_a_batch_that_comes_with_an_interrupt_is_returned_by_the_next_take(silo: SiloProcess):
    thread, client = LoopThread.acquire(), Client(silo.address)
    calls = InterruptedCalls(thread)
    thread.call(client.__aenter__)
    try:
        thread.call(client.publish, S, b"0")
        thread.call(client.publish, S, b"1")
        with SyncConsumer(client.subscribe("s", "n/*", start="earliest"), calls) as consumer:
            for again in (lambda: consumer.take(30), lambda: next(consumer)):
                calls.interrupts = 2
                for interrupted in (lambda: consumer.take(30), lambda: next(consumer)):
                    with pytest.raises(KeyboardInterrupt):
                        interrupted()
                batch = again()
                assert batch is not None
                batch.ack()
            assert batch.payloads() == [b"1"]
            assert consumer.take(0) is None
            assert consumer.statistics().held_events == 0
    finally:
        thread.call(client.aclose)
        thread.release()


def test_a_consumer_whose_opening_is_interrupted_is_closed(silo: SiloProcess):
    thread, client = LoopThread.acquire(), Client(silo.address)
    calls = InterruptedCalls(thread)
    thread.call(client.__aenter__)
    try:
        calls.interrupts = 1
        with pytest.raises(KeyboardInterrupt), SyncConsumer(client.subscribe("s", "n/*"), calls):
            pass
        assert thread.call(client.subscription, "s").consumers == []
    finally:
        thread.call(client.aclose)
        thread.release()


def test_unacknowledged_events_go_to_the_next_consumer(silo: SiloProcess):
    with SyncClient(silo.address) as client:
        with client.subscribe("s", "n/*", start="latest") as consumer:
            client.publish(S, b"0")
            assert next(consumer).payloads() == [b"0"]
        with client.subscribe("s") as consumer:
            assert next(consumer).payloads() == [b"0"]
            consumer.delete()
        assert client.subscriptions() == []
        with pytest.raises(NotFound), client.subscribe("s"):
            pass


def test_batches_are_pulled_and_acknowledged(silo: SiloProcess):
    with SyncClient(silo.address) as client:
        with client.subscribe("s", "n/*", start="earliest"):
            pass
        client.publish(S, b"0")
        client.publish(S, b"1")
        pulled = client.pull("s", "me", max_events=1, wait_s=30)
        assert [batch.payloads() for batch in pulled] == [[b"0"]]
        assert (pulled[0].attempt, len(pulled[:1]), pulled.gaps) == (1, 1, [])
        assert repr(pulled).startswith("SyncPulled('s', 'me'")
        pulled[0].ack()
        assert client.acknowledge(pulled) == 0
        again = client.pull("s", "me", wait_s=30)
        assert [batch.payloads() for batch in again] == [[b"1"]]
        again[0].ack()
        with pytest.raises(InvalidArgument, match="takes the result of `pull`"):
            client.acknowledge([1])  # type: ignore[arg-type]
        assert len(rest := client.pull("s", "me", after=again)) == rest.refused == 0
        assert all(queue.lag == 0 for queue in client.subscription("s").progress)


def named(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_a_consumer_has_the_methods_of_the_async_one():
    assert named(Consumer) - named(SyncConsumer) == {"aclose"}  # `close` in `SyncConsumer`


def test_a_consumer_waits_for_its_beginning_and_its_end(silo: SiloProcess):
    with SyncClient(silo.address) as client:
        with client.subscribe("s", "n/*") as consumer:
            consumer.opened()
        consumer.ended()


def test_a_subscribe_that_fails_raises_and_logs_nothing(silo: SiloProcess, caplog: pytest.LogCaptureFixture):
    with SyncClient(silo.address) as client, pytest.raises(NotFound), client.subscribe("nowhere"):
        pass
    assert not caplog.records


def test_it_has_the_methods_of_the_client_with_their_arguments():
    others = {"aclose", "close", "close_consumers", "connection", "generation_of", "open_consumer", "provider"}
    assert named(Client) - others == named(SyncClient) - others
    for name in named(SyncClient) - others - {"subscribe"}:
        ours, theirs = (list(signature(getattr(kind, name)).parameters) for kind in (SyncClient, Client))
        assert ours == theirs


def test_a_consumer_is_used_within_with_and_has_no_handler(silo: SiloProcess):
    with SyncClient(silo.address) as client:
        consumer = client.subscribe("s", "n/*")
        with pytest.raises(Closed, match="`with`"):
            next(consumer)
        with consumer:
            assert consumer.take(0) is None
        with pytest.raises(InvalidArgument, match="no handlers"):
            client.subscribe("s", "n/*", handler=print)  # type: ignore[arg-type]


def test_threads_publish_at_the_same_time(silo: SiloProcess):
    with SyncClient(silo.address) as client, ThreadPoolExecutor(20) as threads:

        def publish(number: int) -> None:
            for step in range(20):
                client.publish(StreamId("n", str(number)), b"%d" % step)

        list(threads.map(publish, range(20)))
    silo.stop()
    expected = [b"%d" % step for step in range(20)]
    assert asyncio.run(stored(silo.data)) == {StreamId("n", str(number)): expected for number in range(20)}


def threads() -> int:
    return sum(thread.name == "headrace client" for thread in threading.enumerate())


def test_clients_share_a_thread_which_ends_with_the_last(silo: SiloProcess):
    with SyncClient(silo.address) as one:
        with SyncClient(silo.address) as other:
            other.publish(S, b"0")
            assert threads() == 1
        one.publish(S, b"1")
        assert threads() == 1
    assert threads() == 0
    with pytest.raises(Closed):
        one.publish(S, b"2")
    one.close()


def in_thread(function: Callable[[], _T]) -> Future[_T]:
    """Call it in a thread that does not keep the process, so that a call which hangs fails one test only."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


async def nothing() -> None: ...


def test_calls_that_run_or_begin_while_the_thread_ends_raise_closed():
    thread = LoopThread.acquire()
    running, cancelled, go_on = threading.Event(), threading.Event(), threading.Event()

    async def run() -> None:
        running.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
            await asyncio.to_thread(go_on.wait)

    calls = [in_thread(lambda: thread.call(run))]
    assert running.wait(10)
    end = in_thread(thread.release)
    assert cancelled.wait(10)
    calls.append(in_thread(lambda: thread.call(nothing)))
    with pytest.raises(Closed):
        calls[1].result(10)
    assert not calls[0].done()
    go_on.set()
    end.result(10)
    calls.append(in_thread(lambda: thread.call(nothing)))
    for call in calls:
        with pytest.raises(Closed):
            call.result(10)


def test_a_call_whose_task_the_end_of_the_thread_leaves_without_a_step_raises_closed():
    thread = LoopThread.acquire()
    begun, queued, go_on = threading.Event(), threading.Semaphore(0), threading.Event()

    async def block() -> None:
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon_threadsafe

        def note(callback: Callable[[], object]) -> object:
            handle = call_soon(callback)
            queued.release()
            return handle

        loop.call_soon_threadsafe = note  # type: ignore[assignment]
        begun.set()
        go_on.wait(10)

    calls = [in_thread(lambda: thread.call(block))]
    assert begun.wait(10)
    calls.append(in_thread(lambda: thread.call(nothing)))
    assert queued.acquire(timeout=10)
    end = in_thread(thread.release)
    assert queued.acquire(timeout=10)
    go_on.set()
    end.result(10)
    calls[0].result(10)
    with pytest.raises(Closed):
        calls[1].result(10)


def test_a_consumer_ends_in_order_when_its_client_is_closed(silo: SiloProcess):
    with SyncClient(silo.address) as client:
        consumer = client.subscribe("s", "n/*").__enter__()
        calls = [in_thread(lambda: list(consumer)), in_thread(consumer.ended)]
        assert consumer.take(0) is None
    assert [call.result(10) for call in calls] == [[], None]
    assert list(consumer) == []
    assert consumer.take(1) is None
    consumer.ended()
    consumer.close()
    with pytest.raises(Closed):
        consumer.delete()


def test_a_consumer_that_ended_with_an_error_raises_it_after_its_client_is_closed(silo: SiloProcess):
    with SyncClient(silo.address) as client:
        consumer = client.subscribe("s", "n/*").__enter__()
        client.delete_subscription("s")
        with pytest.raises(HeadraceError) as ended:
            consumer.ended()
    for call in (lambda: next(consumer), lambda: consumer.take(1), consumer.ended):
        with pytest.raises(HeadraceError) as raised:
            call()
        assert raised.value is ended.value
    consumer.close()


def test_an_open_client_is_not_entered_again(silo: SiloProcess):
    with SyncClient(silo.address) as client:
        with pytest.raises(InvalidArgument, match="open already"):
            client.__enter__()
        client.publish(S, b"0")
    assert threads() == 0


def test_closing_in_the_thread_of_the_client_is_refused_and_changes_nothing(silo: SiloProcess):
    refused = list[InvalidArgument]()

    def close(state: SessionState) -> None:
        with pytest.raises(InvalidArgument, match="its own thread") as info:
            client.close()
        refused.append(info.value)

    with SyncClient(silo.address) as client:
        with client.subscribe("s", "n/*", on_state=close):
            pass
        assert refused
        client.publish(S, b"0")
        assert threads() == 1
    assert threads() == 0


def test_before_and_after_it_is_open_it_says_so(silo: SiloProcess):
    with pytest.raises(InvalidArgument):
        SyncClient("nowhere")
    with pytest.raises(Closed, match="`with`"):
        SyncClient(silo.address).publish(S, b"0")
    with pytest.raises(Unavailable), SyncClient("127.0.0.1:1", connect_timeout_s=0.1):
        pass
    assert "headrace client" not in {thread.name for thread in threading.enumerate()}


INTERRUPTED = """
import sys
from headrace import StreamId
from headrace import Client
from headrace.client.blocking import SyncClient
with SyncClient(sys.argv[1]) as client:
    client.publish(StreamId("n", "k"), b"0")
    print("published", flush=True)
    sys.stdin.readline()
    try:
        print("waiting", flush=True)
        client.publish(StreamId("n", "k"), b"1")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_ctrl_c_ends_the_wait(silo: SiloProcess):
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, silo.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline() == "published\n"
        silo.kill()
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline() == "waiting\n"
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "interrupted\n"
        assert program.wait(30) == 0


def test_a_program_that_forgets_to_close_ends(silo: SiloProcess):
    script = INTERRUPTED.split("with", maxsplit=1)[0] + (
        "client = SyncClient(sys.argv[1]).__enter__()\nprint(client.publish(StreamId('n', 'k'), b'0'))"
    )
    done = subprocess.run([sys.executable, "-c", script, silo.address], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"0\n"


FORKED = """
import os, sys
from headrace import HeadraceError, StreamId
from headrace.client.blocking import SyncClient

def publish(client):
    try:
        client.publish(StreamId("n", "k"), b"0")
    except HeadraceError as error:
        print(error.code, error, flush=True)

with SyncClient(sys.argv[1]) as client:
    publish(client)
    for _ in range(20):
        if not (child := os.fork()):
            publish(client)
            client.close()
            try:
                SyncClient(sys.argv[1]).__enter__()
            except HeadraceError as error:
                print(error.code, error, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    publish(client)
"""


def test_a_forked_process_is_told_that_it_cannot(silo: SiloProcess):
    """In processes of their own: one that has run other tests has threads that no fork is made for."""
    command = [sys.executable, "-c", FORKED, silo.address]
    done = subprocess.run(command, check=False, capture_output=True, timeout=60, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    assert len(told) == 40
    assert all("closed a client does not survive fork: start" in line for line in told[::2])
    assert all("not_supported this process was forked from one that has opened a client" in line for line in told[1::2])
