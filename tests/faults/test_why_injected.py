"""`headrace why` names faults that are injected into real silo processes: each cause once, as the first one.

`undetermined` has no fault: `tests/silo/test_why.py` shows it from facts alone.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from benchmarks.servers import PostgresServer
from headrace import Event, Provider, StreamId
from headrace.balancer import StreamQueueMapper
from headrace.proto.v1 import observation_pb2 as pb
from headrace.proto.v1 import subscriptions_pb2
from headrace.silo.why_causes import CAUSES
from headrace.silo.why_gathering import explain_stream
from headrace.streams.subscriptions import Selector, Start, SubscriptionDefinition
from tests.cli.commandline import ENVIRONMENT
from tests.cli.forking import forking
from tests.faults.cluster_stores import frozen, own_server
from tests.servers import new_schema
from tests.silo.services.calling import Caller, batch, connecting
from tests.silo.services.sessions import begin, consuming, defined
from tests.silo.talking import Talking, address_of, shares, wait_until
from tests.silo.test_damage import damage

__all__ = ("own_server",)

HANDLERS = Path(__file__).with_name("why_handlers.py")
PATIENCE_S = 30
SESSION_MS = 60_000
MAIN = """\
data = "data"
modules = ["why_handlers"]
drain_s = 0.1
[grpc]
port = 0
[providers.default]
queues = 2
[providers.bound]
queues = 2
[providers.stopped]
queues = 2
[providers.throttled]
queues = 1
cache = { max_events = 20 }
[providers.behind]
queues = 1
cache = { max_events = 80 }
[providers.short]
queues = 1
options = { retain_age_s = 0.01, retain_unfinished = false }
"""

INJECTED: set[str] = set()
TOOK: dict[str, float] = {}
"""Seconds of the slowest answer that names a cause, by its code."""

_T = TypeVar("_T")


def injects(*codes: str) -> Callable[[_T], _T]:
    """Declare the causes that a test injects."""
    INJECTED.update(codes)
    return lambda test: test


@pytest.fixture(scope="module", autouse=True)
def times() -> Iterator[None]:
    """Print how long the answers took."""
    yield
    for code, seconds in sorted(TOOK.items(), key=lambda one: -one[1]):
        print(f"{code}: {seconds * 1000:.0f} ms")


@contextmanager
def silo(directory: Path, config: str, name: str = "silo") -> Generator[Talking]:
    """A silo process; killed at the end."""
    shutil.copy(HANDLERS, directory)
    (directory / f"{name}.toml").write_text(config)
    process = Talking(directory, "silo", f"{name}.toml")
    try:
        yield process
    finally:
        process.clean_up()


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talking]:
    """A silo with all queues. Each test has streams of its own."""
    with silo(tmp_path_factory.mktemp("main"), MAIN) as process:
        address_of(process)
        yield process


async def headrace(directory: Path, *arguments: object) -> str:
    """Run a command to its end. Return its output."""
    texts = [str(each) for each in arguments]
    code, out, err = await asyncio.to_thread(forking().run, texts, b"", directory, ENVIRONMENT, PATIENCE_S)
    assert code == 0, err
    return out.decode()


async def causes(
    caller: Caller, stream: str, name: str = "", provider: str = ""
) -> dict[str, Sequence[pb.StreamCause]]:
    """Ask a silo. Return the causes by subscription."""
    request = pb.ExplainStreamRequest(subscription=name, provider=provider)
    request.stream.namespace, _, request.stream.key = stream.partition("/")
    began = time.monotonic()
    method = "headrace.v1.ObservationService/ExplainStream"
    answer = await caller.ask(method, request, pb.ExplainStreamResponse, timeout=PATIENCE_S)
    took = time.monotonic() - began
    for one in answer.explanations:
        TOOK[one.causes[0].code] = max(TOOK.get(one.causes[0].code, 0.0), took)
    return {one.subscription: one.causes for one in answer.explanations}


async def evidence(caller: Caller, code: str, stream: str, name: str, provider: str = "") -> str:
    """Wait until `code` is the first cause. Return its evidence."""
    found: Sequence[pb.StreamCause] = ()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        (found,) = (await causes(caller, stream, name, provider)).values()
        if found[0].code == code:
            return found[0].evidence
        await asyncio.sleep(0.02)
    raise AssertionError(f"{code} is not the first of {list(found)}")


async def create(caller: Caller, name: str, selector: str, provider: str = "") -> None:
    request = subscriptions_pb2.CreateSubscriptionRequest(provider=provider, definition=defined(name, selector))
    kind = subscriptions_pb2.CreateSubscriptionResponse
    await caller.ask("headrace.v1.SubscriptionService/CreateSubscription", request, kind)


def test_every_cause_is_injected() -> None:
    assert CAUSES.keys() - {"undetermined"} == INJECTED


# ---- handlers ------------------------------------------------------------------------------------------------------


@injects("handler_running", "stream_retrying", "stream_paused", "dead_lettered", "nothing_pending")
@pytest.mark.parametrize(
    ("name", "code", "shown"),
    [
        ("running", "handler_running", "the handler of subscription 'running' runs"),
        ("retrying", "stream_retrying", r"attempt \d of 8 failed, the next in .* s: ValueError: no such customer"),
        ("paused", "stream_paused", "the account is closed"),
        ("dead", "dead_lettered", "no such currency"),
        ("done", "nothing_pending", "is done"),
    ],
)
async def test_the_state_of_a_handler_is_named(main: Talking, name: str, code: str, shown: str) -> None:
    async with connecting(address_of(main)) as caller:
        await caller.publish(batch(f"{name}/1", b"x"))
        assert re.search(shown, await evidence(caller, code, f"{name}/1", name))


@injects("held_by_breaker")
async def test_a_dependency_that_is_down_is_named(main: Talking) -> None:
    async with connecting(address_of(main)) as caller:
        await caller.publish(*(batch(f"held/{number}", b"x") for number in range(20)))
        for number in (0, 19):
            assert "the database of invoices is down" in await evidence(
                caller, "held_by_breaker", f"held/{number}", "held"
            )


@injects("concurrency_full")
async def test_a_stream_that_waits_for_a_worker_is_named_however_far_behind(main: Talking) -> None:
    async with connecting(address_of(main)) as caller:
        streams = streams_of(0, 2, "full")
        await caller.publish(batch(streams[0], b"x"))
        await evidence(caller, "handler_running", streams[0], "full")
        await caller.publish(*(batch(stream, b"x") for stream in streams[1:]))
        for stream in (streams[1], streams[-1]):
            assert await evidence(caller, "concurrency_full", stream, "full") == (
                "all workers of subscription 'full' are in use"
            )


def streams_of(queue: int, queues: int, namespace: str, count: int = 20) -> list[str]:
    mapper = StreamQueueMapper(queues)
    keys = (str(number) for number in range(1000))
    return [f"{namespace}/{key}" for key in keys if mapper.queue_of(StreamId(namespace, key)) == queue][:count]


@injects("throttled")
async def test_a_full_cache_is_named_with_the_stream_that_holds_it(main: Talking) -> None:
    async with connecting(address_of(main)) as caller:
        for number in range(40):
            await caller.publish(batch(f"n/{number}", b"x"), provider="throttled")
        for name in ("quick", "stuck"):
            assert "stuck: n/0" in await evidence(caller, "throttled", "n/39", name, "throttled")
        await evidence(caller, "handler_running", "n/0", "stuck", "throttled")


@injects("catching_up")
async def test_a_subscription_that_is_far_behind_is_named(main: Talking) -> None:
    """Its handler takes half a second for an event. Another subscription needs the cache."""
    async with connecting(address_of(main)) as caller:
        for number in range(100):
            await caller.publish(batch(f"n/{number}", b"x"), provider="behind")
        definition = defined("ahead", start=subscriptions_pb2.Start(latest=True))
        async with consuming(caller, provider="behind", definition=definition, consumer="c"):
            text = await evidence(caller, "catching_up", "n/99", "slow", "behind")
            assert "subscription 'slow'" in text
            assert "queue 0" in text


# ---- subscriptions and streams -------------------------------------------------------------------------------------


@injects("not_served", "subscription_missing", "pattern_does_not_match", "no_subscription", "no_such_stream")
async def test_wrong_names_and_missing_consumers_are_named(main: Talking) -> None:
    async with connecting(address_of(main)) as caller:
        await create(caller, "idle", "idle/*")
        await caller.publish(batch("idle/1", b"x"), batch("other/1", b"x"))
        assert "'idle' has no handler and no consumer" in await evidence(caller, "not_served", "idle/1", "idle")
        assert "'idel'" in await evidence(caller, "subscription_missing", "idle/1", "idel")
        assert "'idle/*'" in await evidence(caller, "pattern_does_not_match", "other/1", "idle")
        assert "patterns checked" in await evidence(caller, "no_subscription", "other/1", "")
        assert "has no event of done/none" in await evidence(caller, "no_such_stream", "done/none", "done")


@pytest.mark.long
@injects("not_asked")
async def test_the_data_directory_alone_does_not_show_the_consumers(main: Talking) -> None:
    async with connecting(address_of(main)) as caller:
        await create(caller, "asked", "asked/*")
        await caller.publish(batch("asked/1", b"x"))
    question = ("why", "asked/1", "--subscription", "asked", "--json")
    (found,) = json.loads(await headrace(main.directory, *question, "--data", "data"))
    assert found["causes"][0]["code"] == "not_asked"
    assert "'asked'" in found["causes"][0]["evidence"]
    (found,) = json.loads(await headrace(main.directory, *question, "--server", address_of(main)))
    assert found["causes"][0]["code"] == "not_served"


@injects("standing_by")
async def test_a_process_that_stands_by_names_the_one_that_serves(main: Talking) -> None:
    async def running(_: Event) -> None: ...

    async with Provider.open(main.directory / "data") as provider:
        await provider.subscribe("running", None, running)
        await provider.stream("running", "standby").publish(b"x")
        (found,) = await explain_stream(provider, StreamId("running", "standby"), "running")
    assert found.causes[0].code == "standing_by"
    assert f"is served by process {main.process.pid}" in found.causes[0].evidence


@pytest.mark.long
@injects("retained_away")
async def test_events_that_retention_removed_are_named(main: Talking) -> None:
    async with connecting(address_of(main)) as caller:
        await create(caller, "late", "n/*", "short")
        await caller.publish(batch("n/1", b"x"), batch("n/2", b"x"), provider="short")
        await evidence(caller, "no_such_stream", "n/1", "late", "short")
        async with consuming(caller, "late", provider="short", consumer="c"):
            assert "offsets 0 to" in await evidence(caller, "retained_away", "n/1", "late", "short")


@injects("agent_stopped")
async def test_a_stopped_agent_is_named(main: Talking) -> None:
    (stream, *_), (other, *_) = streams_of(1, 2, "n"), streams_of(0, 2, "n")
    async with connecting(address_of(main)) as caller:
        await create(caller, "s", "n/*", "stopped")
        await caller.publish(batch(stream, b"x"), batch(other, b"x"), provider="stopped")
        await headrace(
            main.directory,
            "cluster",
            "stop-agents",
            "--server",
            address_of(main),
            "--provider",
            "stopped",
            "--queue",
            1,
        )
        assert "queue 1" in await evidence(caller, "agent_stopped", stream, "s", "stopped")
        await evidence(caller, "not_served", other, "s", "stopped")


# ---- consumers over gRPC -------------------------------------------------------------------------------------------


@injects("consumer_silent", "consumer_disconnected")
async def test_a_consumer_that_holds_a_stream_is_named(main: Talking) -> None:
    async with connecting(address_of(main)) as caller:
        await caller.publish(batch("silent/1", b"x"))
        async with connecting(address_of(main)) as other:
            session = await begin(
                other, definition=defined("silent", "silent/*"), consumer="mute", session_timeout_ms=SESSION_MS
            )
            await session.grant()
            await session.take(1)
            assert "consumer 'mute', no ack" in await evidence(caller, "consumer_silent", "silent/1", "silent")
            session.cancel()
        assert "consumer 'mute'" in await evidence(caller, "consumer_disconnected", "silent/1", "silent")


@injects("out_of_credit")
async def test_a_consumer_without_credit_is_named(main: Talking) -> None:
    async with connecting(address_of(main)) as caller:
        await caller.publish(batch("credit/1", b"x"))
        definition = defined("credit", "credit/*")
        session = await begin(caller, definition=definition, consumer="c", session_timeout_ms=SESSION_MS)
        assert "none with credit" in await evidence(caller, "out_of_credit", "credit/1", "credit")
        await session.grant(1)
        await session.take(1)
        await evidence(caller, "consumer_silent", "credit/1", "credit")
        await caller.publish(*(batch(f"credit/{number}", b"x") for number in range(2, 20)))
        await evidence(caller, "out_of_credit", "credit/19", "credit")
        session.cancel()


@pytest.mark.long
@injects("consumer_blocked")
async def test_a_consumer_that_does_not_read_is_named(main: Talking) -> None:
    async with connecting(address_of(main)) as caller:
        streams = [f"deaf/{number}" for number in range(200)]
        for stream in streams:
            await caller.publish(batch(stream, bytes(100_000)))
        async with connecting(address_of(main)) as other:
            definition = defined("deaf", "deaf/*")
            session = await begin(other, definition=definition, consumer="deaf", session_timeout_ms=SESSION_MS)
            await session.grant()
            text = await evidence(caller, "consumer_blocked", streams[-1], "deaf")
            assert "consumer 'deaf': it does not read fast enough" in text
            session.cancel()


@injects("queue_not_assigned")
async def test_a_queue_on_its_way_to_another_consumer_is_named(main: Talking) -> None:
    streams = [streams_of(queue, 2, "n") for queue in range(2)]
    async with connecting(address_of(main)) as caller:
        definition = defined("bound", mode=subscriptions_pb2.MODE_BOUND)
        options: dict[str, Any] = {"provider": "bound", "session_timeout_ms": SESSION_MS}
        first = await begin(caller, definition=definition, consumer="a", **options)
        await first.grant()
        await caller.publish(*(batch(each[0], b"x") for each in streams), provider="bound")
        await first.take(2)
        second = await begin(caller, "bound", consumer="b", **options)
        await second.grant()
        await caller.publish(*(batch(each[1], b"x") for each in streams), provider="bound")
        moving = 1
        text = await evidence(caller, "queue_not_assigned", streams[moving][1], "bound", "bound")
        assert text == f"queue {moving}: 2 consumers connected"
        await evidence(caller, "consumer_silent", streams[1 - moving][1], "bound", "bound")
        for session in (first, second):
            session.cancel()


# ---- faults of the disk, of a database, and of silos ----------------------------------------------------------------


@pytest.mark.long
@injects("corrupt_record")
async def test_a_damaged_record_is_named_to_the_subscriptions_that_it_stops(tmp_path: Path) -> None:
    data, streams = tmp_path / "data", [f"done/{number}" for number in range(5)]
    async with Provider.open(data, queues=1) as provider:
        for stream in streams:
            await provider.publish(StreamId.parse(stream), b"x")
        past = await provider.subscribe("past", "done/*", _take, start=Start.earliest())
        await past.caught_up()
        await provider.create_subscription(
            SubscriptionDefinition(name="idle", selector=Selector("done/*"), start=Start.earliest())
        )
    await asyncio.to_thread(damage, data, 2)
    config = MAIN.replace("queues = 2", "queues = 1")
    with silo(tmp_path, config) as process:
        async with connecting(address_of(process)) as caller:
            for name in ("idle", "done"):
                assert "queue 0, offset 2" in await evidence(caller, "corrupt_record", streams[4], name)
            async with consuming(caller, "past", consumer="c"):
                for stream in (streams[0], streams[4]):
                    await evidence(caller, "nothing_pending", stream, "past")
                await caller.publish(batch(streams[1], b"y"))
                assert "queue 0, offset 2" in await evidence(caller, "agent_faulted", streams[1], "past")


async def _take(event: Event) -> None: ...


CLUSTER = """\
data = "data"
drain_s = 0.1
[grpc]
port = 0
[cluster]
name = "{name}"
period_s = 0.1
lease_s = 60
dead_after_s = 2
maturity_s = 0.2
{cluster}
[providers.default]
queues = 8
"""
EXTRA = "[providers.extra]\nqueues = 1\n"


@pytest.mark.long
@injects("owner_unreachable", "owner_dead", "no_silo_for_provider", "no_lease")
async def test_silos_that_stop_and_end_are_named(tmp_path: Path) -> None:
    with ExitStack() as stack:
        a = stack.enter_context(silo(tmp_path, CLUSTER.format(name="a", cluster=""), "a"))
        b = stack.enter_context(silo(tmp_path, CLUSTER.format(name="b", cluster="") + EXTRA, "b"))
        for process in (a, b):
            address_of(process)
        server = ("--server", address_of(a))
        wait_until(address_of(a), lambda cluster: shares(cluster) == {"a": 4, "b": 5})
        async with connecting(address_of(a)) as caller:
            await create(caller, "s", "n/*")
            async with connecting(address_of(b)) as other:
                await create(other, "s", "n/*", "extra")
                await caller.publish(*(batch(f"n/{number}", b"x") for number in range(20)))
            owners = owners_of(await headrace(tmp_path, "cluster", *server, "--json"))
            mine, others = (
                next(f"n/{key}" for key in range(20) if owners[queue_of(f"n/{key}")] == name) for name in ("a", "b")
            )
            for stream in (mine, others):
                await evidence(caller, "not_served", stream, "s")
            b.process.send_signal(signal.SIGSTOP)
            first = (await causes(caller, others, "s"))["s"][0]
            assert first.code == "owner_unreachable"
            assert "silo 'b', last heartbeat" in first.evidence
            await evidence(caller, "not_served", mine, "s")
            assert "silo 'b', last heartbeat" in await evidence(caller, "owner_dead", others, "s")
            text = await evidence(caller, "no_silo_for_provider", "n/1", "s", "extra")
            assert text == "0 living silos serve provider 'extra'"
            b.process.kill()
            await evidence(caller, "owner_dead", others, "s")
            await headrace(tmp_path, "cluster", "drain", *server, "a")
            assert "names no silo" in await evidence(caller, "no_lease", mine, "s")


def queue_of(stream: str) -> int:
    return StreamQueueMapper(8).queue_of(StreamId.parse(stream))


def owners_of(shown: str) -> dict[int, str]:
    """The silo of each queue, from the output of `headrace cluster --json`."""
    return {queue: one["name"] for one in json.loads(shown)["silos"] for queue in one["queues"]["default"]}


@pytest.mark.long
@injects("store_unreachable", "agent_faulted")
async def test_a_database_that_hangs_or_is_down_is_named(tmp_path: Path, own_server: PostgresServer) -> None:
    """It has the control store of a cluster, and some of the queues there; and the queues of a silo of its own."""
    store = f'store = "{new_schema(own_server)}"'
    rows = 'adapter = "postgres"\nqueues = 2\noptions = {{ url = "{}", create = true }}\n'
    ours, others = (rows.format(new_schema(own_server)) for _ in range(2))
    with ExitStack() as stack:
        a, b, c = (
            stack.enter_context(silo(tmp_path, config, name))
            for name, config in (
                ("a", CLUSTER.format(name="a", cluster=store) + f"[providers.rows]\n{ours}"),
                ("b", CLUSTER.format(name="b", cluster=store) + f"[providers.rows]\n{ours}"),
                ("c", f'data = "alone"\n[grpc]\nport = 0\n[providers.default]\n{others}'),
            )
        )
        for process in (a, b, c):
            address_of(process)
        wait_until(address_of(a), lambda cluster: shares(cluster) == {"a": 5, "b": 5})
        async with connecting(address_of(a)) as caller, connecting(address_of(c)) as alone:
            asked = [(caller, ""), (caller, "rows"), (alone, "")]
            streams = [f"n/{number}" for number in range(8)]
            for each, provider in asked:
                await create(each, "s", "n/*", provider)
                await each.publish(*(batch(stream, b"x") for stream in streams), provider=provider)
                options: dict[str, Any] = {"provider": provider, "session_timeout_ms": 5 * SESSION_MS}
                await (await begin(each, "s", consumer="c", **options)).grant()
            for each, provider in asked:
                for stream in streams:
                    await evidence(each, "consumer_silent", stream, "s", provider)
            with frozen(own_server):
                await _see_the_database_named(caller, alone, streams)
            for each, provider in asked:
                await evidence(each, "consumer_silent", streams[0], "s", provider)
            await asyncio.to_thread(own_server.stop)
            await _see_the_database_named(caller, alone, streams)
            await asyncio.to_thread(own_server.start)
            for each, provider in asked:
                await evidence(each, "consumer_silent", streams[0], "s", provider)


async def _see_the_database_named(cluster: Caller, alone: Caller, streams: Sequence[str]) -> None:
    for provider in ("", "rows"):
        for stream in (*streams, *(f"n/new-{number}" for number in range(4))):
            (found,) = (await causes(cluster, stream, "s", provider)).values()
            assert found[0].code == "store_unreachable"
            assert found[0].evidence
            assert "owner_unreachable" not in [cause.code for cause in found]
    (first, *_) = (await causes(alone, "n/new", "s"))["s"]
    assert (first.code, bool(re.match(r"queue \d: .", first.evidence))) == ("agent_faulted", True)
    (first, *_) = (await causes(alone, streams[0], "s"))["s"]
    assert first.code == "consumer_silent"
