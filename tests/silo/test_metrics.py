"""The metrics: their values after known events, the table in the docs, and registries of other programs."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headrace import (
    Client,
    Closed,
    Event,
    InvalidArgument,
    Mode,
    OnFailure,
    Provider,
    RetryPolicy,
    Selector,
    SlowConsumer,
    StorageError,
    StreamId,
    SubscriptionDefinition,
    Unavailable,
)
from headrace.server.config import GrpcConfig
from headrace.silo.config import CacheConfig, ProviderConfig, SiloConfig
from headrace.silo.host import Silo
from headrace.silo.lag_history import STORE_SAMPLES
from headrace.silo.metric_definitions import SECTIONS
from headrace.silo.metrics import ANSWER_S, tables
from headrace.silo.unserved_queues import UnservedQueues
from headrace.streams.cluster import ClusterView, Lease

from ..client.consumers import until
from .clusters import clustered
from .services.calling import opened

DOCS = Path(__file__).parent.parent.parent / "docs"
Samples = dict[tuple[str, ...], float]


def parsed(text: bytes) -> Samples:
    """The samples by name and labels, as in ("headrace_gaps_total", "provider=default", "subscription=s")."""
    return {
        (sample.name, *(f"{label}={value}" for label, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


async def samples_of(silo: Silo) -> Samples:
    return parsed((await silo.metrics()).body)


async def metrics_until(silo: Silo, condition: Callable[[Samples], bool]) -> Samples:
    """Return the samples once they fulfil the condition. The lag is measured in the background."""
    async with asyncio.timeout(30):
        while not condition(samples := await samples_of(silo)):  # noqa: ASYNC110 (the silo tells nobody)
            await asyncio.sleep(0.05)
    return samples


S = ("provider=default", "subscription=s")


def test_the_tables_of_the_docs_have_all_metrics():
    text = (DOCS / "metrics.md").read_text()
    made = tables().rstrip()
    assert made in text, 'put this into docs/metrics.md, after "## All metrics":\n' + made


def test_every_metric_has_one_name_and_a_help_that_is_a_sentence():
    definitions = [one for section in SECTIONS for one in section.definitions]
    names = [one.name for one in definitions]
    assert len(names) == len(set(names))
    for one in definitions:
        assert not one.name.endswith("_total")
        assert one.help[0].isupper() or one.help[0] == "1"
        assert one.help.endswith(".")
        assert not {"stream", "key", "consumer", "error", "token"} & set(one.labels)


async def test_failures_are_counted_by_cause(tmp_path: Path) -> None:
    errors: list[Exception] = [Unavailable("the bank is closed"), ValueError("no"), ValueError("no")]

    async def pay(event: Event) -> None:
        if errors:
            raise errors.pop(0)

    async with opened(tmp_path) as silo:
        provider = silo.providers["default"]
        retry = RetryPolicy(max_attempts=5, initial_delay_s=0.01)
        subscription = await provider.subscribe("s", "n/*", pay, retry=retry, circuit_breaker=False)
        await provider.publish(StreamId("n", "k"), b"x")
        await subscription.caught_up()
        found = await samples_of(silo)
        causes = {cause: found["headrace_retries_total", f"cause={cause}", *S] for cause in ("failure", "unavailable")}
        assert causes == {"failure": 2, "unavailable": 1}
        assert found["headrace_retries_total", "cause=held", *S] == 0
        assert found["headrace_handling_seconds_count", *S] >= 1
        assert found["headrace_delivery_delay_seconds_count", *S] >= 1


async def test_lag_is_in_events_bytes_batches_and_seconds(tmp_path: Path) -> None:
    blocked = asyncio.Event()

    async def wait(event: Event) -> None:
        await blocked.wait()

    async with opened(tmp_path) as silo:
        provider = silo.providers["default"]
        subscription = await provider.subscribe("s", "n/*", wait)
        stream = StreamId("n", "k")
        for _ in range(3):
            await provider.publish(stream, [b"x" * 100, b"y" * 100])
        at = ("provider=default", f"queue={provider.queue_of(stream)}", "subscription=s")
        late = await metrics_until(silo, lambda found: found.get(("headrace_lag_seconds", *at), 0) > 2)
        assert (late["headrace_lag_events", *at], late["headrace_lag_batches", *at]) == (6, 3)
        assert 600 < late["headrace_lag_bytes", *at] < 1200
        blocked.set()
        await subscription.caught_up()
        done = await metrics_until(silo, lambda found: found["headrace_lag_events", *at] == 0)
        assert (done["headrace_lag_seconds", *at], done["headrace_lag_bytes", *at]) == (0, 0)


async def test_events_of_a_consumer_that_is_gone_are_returned(tmp_path: Path) -> None:
    async with opened(tmp_path) as silo, Client(silo.grpc_address or "") as client:
        await client.publish(StreamId("n", "k"), [b"1", b"2", b"3"])
        async with client.subscribe("s", "n/*", start="earliest") as consumer:
            await anext(aiter(consumer))
            held = await samples_of(silo)
            assert held["headrace_consumers", *S] == 1
            assert held["headrace_held_events", *S] == 3
            assert held["headrace_credit_events", *S] > 0
        gone = await metrics_until(silo, lambda found: found["headrace_consumers", *S] == 0)
        assert gone["headrace_returned_events_total", *S] == 3
        assert gone["headrace_held_events", *S] == 0


async def test_a_paused_stream_is_no_lag(tmp_path: Path) -> None:
    async def pay(event: Event) -> None:
        if event.payload == b"poison":
            raise ValueError("no")

    async with opened(tmp_path, provider={"queues": 1}) as silo:
        provider = silo.providers["default"]
        once = RetryPolicy(max_attempts=1)
        await provider.subscribe("s", "n/*", pay, on_failure=OnFailure.PAUSE, retry=once)
        await provider.publish(StreamId("n", "bad"), [b"poison", b"x"])
        for number in range(20):
            await provider.publish(StreamId("n", str(number)), b"fine")
        at = ("provider=default", "queue=0", "subscription=s")
        found = await metrics_until(
            silo,
            lambda found: (
                found["headrace_streams_paused", *S] == 1
                and found["headrace_delivered_events_total", *S] == 20
                and found.get(("headrace_lag_batches", *at)) == 0
            ),
        )
        assert (found["headrace_lag_events", *at], found["headrace_lag_seconds", *at]) == (0, 0)


@pytest.mark.long
async def test_the_lag_of_a_subscription_that_nobody_serves_is_measured(tmp_path: Path) -> None:
    async with opened(tmp_path, provider={"queues": 1}) as silo:
        provider = silo.providers["default"]
        await provider.create_subscription(SubscriptionDefinition(name="s", selector=Selector("n/*")))
        await provider.publish(StreamId("n", "k"), [b"1", b"2"])
        at = ("provider=default", "queue=0", "subscription=s")
        late = await metrics_until(silo, lambda found: found.get(("headrace_lag_seconds", *at), 0) > 0.5)
        assert late["headrace_lag_events", *at] == 2
        assert ("headrace_delivered_events_total", *S) not in late


async def test_consumers_of_a_broadcast_are_one_subscription_and_its_counts_never_fall(tmp_path: Path) -> None:
    async with opened(tmp_path) as silo, Client(silo.grpc_address or "") as client:
        delivered = ("headrace_delivered_events_total", *S)
        for name in ("one", "two"):
            async with client.subscribe("s", "n/*", mode=Mode.BROADCAST, consumer=name, start="earliest") as consumer:
                if name == "one":
                    await client.publish(StreamId("n", "k"), [b"1", b"2", b"3"])
                batch = await anext(aiter(consumer))
                await batch.ack()
                await consumer.saved()
                found = await samples_of(silo)
                names = {label for sample in found for label in sample if label.startswith("subscription=")}
                assert names == {"subscription=s"}
                assert found[delivered] == (3 if name == "one" else 6)


@pytest.mark.long
async def test_a_sample_that_fails_leaves_the_lag_out_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, provider={"queues": 1}) as silo:
        provider = silo.providers["default"]
        await provider.subscribe("s", "n/*", _ignore)
        at = ("headrace_lag_events", "provider=default", "queue=0", "subscription=s")
        await metrics_until(silo, lambda found: at in found)

        async def fail(_: int) -> None:
            raise RuntimeError("a bug of the adapter")

        with monkeypatch.context() as broken:
            broken.setattr(provider.adapter, "bounds", fail)
            await metrics_until(silo, lambda found: at not in found)
        await metrics_until(silo, lambda found: at in found)


async def test_a_full_cache_and_the_subscription_that_leaves_it_are_measured(tmp_path: Path) -> None:
    blocked = asyncio.Event()

    async def wait(event: Event) -> None:
        await blocked.wait()

    provider_options = {"queues": 1, "cache": CacheConfig(max_events=100)}
    async with opened(tmp_path, provider=provider_options) as silo:
        provider = silo.providers["default"]
        subscription = await provider.subscribe("s", "n/*", wait, slow_consumer=SlowConsumer.THROTTLE)
        for number in range(50):
            await provider.publish(StreamId("n", str(number)), [b"x"] * 10)
        queue = ("provider=default", "queue=0")
        full = await metrics_until(
            silo, lambda found: found.get(("headrace_cache_pressure_seconds_total", *queue), 0) > 0.1
        )
        assert full["headrace_cache_pressure", *queue] == 1
        assert full["headrace_detached_streams_total", *S] == 0
        await provider.subscribe("slow", "n/*", wait, slow_consumer=SlowConsumer.DETACH, start="earliest")
        slow = ("provider=default", "subscription=slow")
        assert (await samples_of(silo))["headrace_detached_streams_total", *slow] == 0
        blocked.set()
        await subscription.caught_up()
        later = await metrics_until(silo, lambda found: found["headrace_cache_pressure", *queue] == 0)
        pressure = later["headrace_cache_pressure_seconds_total", *queue]
        assert (await samples_of(silo))["headrace_cache_pressure_seconds_total", *queue] == pressure


async def test_streams_that_leave_the_cache_are_counted_and_caught_up(tmp_path: Path) -> None:
    blocked = asyncio.Event()

    async def wait(event: Event) -> None:
        await blocked.wait()

    provider_options = {"queues": 1, "cache": CacheConfig(max_events=100), "detach_after_s": 0.01}
    async with opened(tmp_path, provider=provider_options) as silo:
        provider = silo.providers["default"]
        subscription = await provider.subscribe("s", "n/*", wait, slow_consumer=SlowConsumer.DETACH)
        for number in range(50):
            await provider.publish(StreamId("n", str(number)), [b"x"] * 10)
        await metrics_until(silo, lambda found: found["headrace_detached_streams_total", *S] > 0)
        blocked.set()
        await subscription.caught_up()


async def test_catch_ups_are_counted_while_they_run(tmp_path: Path) -> None:
    handled, released = 0, asyncio.Event()

    async def handle(event: Event) -> None:
        nonlocal handled
        handled += 1
        if not released.is_set():
            await asyncio.sleep(0.01)

    async with opened(tmp_path, provider={"queues": 1, "cache": CacheConfig(max_events=50)}) as silo:
        provider = silo.providers["default"]
        await provider.subscribe("other", "n/*", _ignore)
        for number in range(500):
            await provider.publish(StreamId("n", str(number)), b"x")
        subscription = await provider.subscribe("s", "n/*", handle, concurrency=1, start="earliest")
        await metrics_until(silo, lambda found: found["headrace_catch_ups", *S] == 1)
        released.set()
        await subscription.caught_up()
        assert handled == 500
        await metrics_until(silo, lambda found: found["headrace_catch_ups", *S] == 0)


async def test_errors_of_the_queue_and_of_the_store_are_counted(tmp_path: Path) -> None:
    generator = {"adapter": "generator", "queues": 1, "options": {"events": 10_000, "read_errors": 0.5}}
    async with opened(tmp_path, provider=generator) as silo:
        await silo.providers["default"].subscribe("s", "*/*", _ignore, start="earliest")
        queue = ("provider=default", "queue=0")
        await metrics_until(silo, lambda found: found.get(("headrace_queue_read_errors_total", *queue), 0) > 0)
        with closing(sqlite3.connect(tmp_path / "control.db")) as other:
            other.execute("DROP TABLE gaps")
        with pytest.raises(StorageError):
            await silo.providers["default"].store.gaps("default")
        errors = [value for name, value in (await samples_of(silo)).items() if name[0] == "headrace_store_errors_total"]
        assert sum(errors) >= 1


async def test_dead_letters_that_are_kept_are_counted_after_a_restart_too(tmp_path: Path) -> None:
    async def refuse(event: Event) -> None:
        raise ValueError("no")

    letters = ("headrace_kept_dead_letters", *S)
    async with opened(tmp_path) as silo:
        provider = silo.providers["default"]
        subscription = await provider.subscribe("s", "n/*", refuse, retry=RetryPolicy(max_attempts=1))
        for _ in range(STORE_SAMPLES):
            await silo.lag_history.sample(provider)
        assert (await samples_of(silo))[letters] == 0
        await provider.publish(StreamId("n", "k"), [b"1", b"2"])
        await subscription.caught_up()
    async with opened(tmp_path) as silo, Client(silo.grpc_address or "") as client:
        found = await metrics_until(silo, lambda found: letters in found)
        assert found[letters] == 2
        await client.delete_dead_letters("s")
        for _ in range(STORE_SAMPLES):
            await silo.lag_history.sample(silo.providers["default"])
        assert (await samples_of(silo))[letters] == 0


async def test_the_log_and_the_store_are_measured(tmp_path: Path) -> None:
    async with opened(tmp_path) as silo:
        provider = silo.providers["default"]
        await provider.publish(StreamId("n", "k"), b"x")
        found = await samples_of(silo)
        assert found["headrace_publish_seconds_count", "provider=default"] == 1
        assert found["headrace_adapter_seconds_count", "operation=commit", "provider=default"] >= 1
        assert found["headrace_store_seconds_count", "use=progress"] >= 1
        assert found["headrace_checkpoint_age_seconds", "provider=default"] < 30
        await metrics_until(silo, lambda found: found["headrace_loop_delay_seconds_count",] > 0)


async def test_a_call_that_fails_counts_with_its_code(tmp_path: Path) -> None:
    async with opened(tmp_path) as silo, Client(silo.grpc_address or "") as client:
        with pytest.raises(Exception, match="nowhere"):
            await client.dead_letters("nowhere")
        found = await samples_of(silo)
        assert found["headrace_grpc_failed_calls_total", "code=not_found"] == 1


async def _ignore(event: Event) -> None: ...


async def test_moves_of_queues_and_silos_are_measured(tmp_path: Path) -> None:
    config = SiloConfig(data=str(tmp_path), grpc=GrpcConfig(port=0), providers={"default": ProviderConfig(queues=4)})
    async with clustered(config, 2) as silos:
        found = await metrics_until(silos[0], lambda found: found["headrace_silos", "state=active"] == 2)
        changes = {
            change: found["headrace_queue_moves_total", f"change={change}", "provider=default"]
            for change in ("gained", "given_back", "cut")
        }
        queues = silos[0].providers["default"].queues
        owned = [found["headrace_queue_owned", "provider=default", f"queue={queue}"] for queue in range(queues)]
        assert changes["gained"] - changes["given_back"] - changes["cut"] == sum(owned) == queues / 2
        epochs = {name[-1] for name in found if name[0] == "headrace_queue_epoch"}
        assert len(epochs) == sum(owned)
        assert found["headrace_queues_unserved", "provider=default"] == 0
        assert found["headrace_cluster_view_age_seconds",] < 30


def test_time_without_a_silo_is_summed_over_the_queues():
    unserved = UnservedQueues({"default": 2})

    def see(now: float, *owned: int) -> None:
        leases = [Lease("default", queue, "a", 1, 1, 0) for queue in owned]
        unserved.update(ClusterView(0, [], leases), now)

    see(10)
    assert (unserved.count("default"), unserved.total_s("default", 11)) == (2, 2)
    see(12, 0)
    assert (unserved.count("default"), unserved.total_s("default", 13)) == (1, 5)
    see(14, 0, 1)
    assert (unserved.count("default"), unserved.total_s("default", 20)) == (0, 6)
    see(30, 1)
    assert (unserved.count("default"), unserved.total_s("default", 31)) == (1, 7)


# ---- registries of other programs ------------------------------------------------------------------------------------


async def test_a_provider_registers_in_a_registry_and_leaves_it_when_it_is_closed(tmp_path: Path) -> None:
    registry = CollectorRegistry(auto_describe=True)
    published = "headrace_published_events_total"
    async with Provider.open(tmp_path / "1", name="one") as one:
        one.register_metrics(registry)
        with pytest.raises(InvalidArgument, match="registered already"):
            one.register_metrics(registry)
        await one.publish(StreamId("n", "k"), [b"1", b"2"])
        async with Provider.open(tmp_path / "2", name="two") as two:
            two.register_metrics(registry)
            here = generate_latest(registry)
            assert parsed(here)[published, "provider=one"] == 2
            assert parsed(here)[published, "provider=two"] == 0
            assert here.count(b"# TYPE headrace_published_events_total") == 1
            elsewhere = await asyncio.to_thread(generate_latest, registry)
            assert parsed(elsewhere)[published, "provider=one"] == 2
        assert (published, "provider=two") not in parsed(generate_latest(registry))
    assert generate_latest(registry) == b""
    async with Provider.open(tmp_path / "1", name="one") as again:
        again.register_metrics(registry)
        assert parsed(generate_latest(registry))[published, "provider=one"] == 0


async def test_readers_at_the_same_time_share_an_answer(tmp_path: Path) -> None:
    async with opened(tmp_path) as silo:
        answers = await asyncio.gather(*(silo.metrics() for _ in range(20)))
        assert len({id(answer.body) for answer in answers}) == 1
        later = await silo.metrics()
        assert later.body is not answers[0].body


async def test_a_closed_provider_registers_nothing(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    async with Provider.open(tmp_path) as provider:
        pass
    with pytest.raises(Closed):
        provider.register_metrics(registry)
    assert generate_latest(registry) == b""


async def test_a_reader_in_another_thread_gets_nothing_of_a_provider_whose_loop_is_blocked(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    texts: list[bytes] = []
    async with Provider.open(tmp_path) as provider:
        provider.register_metrics(registry)
        reader = threading.Thread(target=lambda: texts.append(generate_latest(registry)))
        reader.start()
        reader.join(ANSWER_S + 10)  # blocks the loop
        assert b"provider=" not in texts[0]


async def test_a_registry_has_each_name_once(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    async with Provider.open(tmp_path / "1") as one, Provider.open(tmp_path / "2") as two:
        one.register_metrics(registry)
        with pytest.raises(InvalidArgument, match="has the metrics of a provider 'default' already"):
            two.register_metrics(registry)
        two.register_metrics(CollectorRegistry())


@pytest.mark.long
async def test_a_registry_is_read_in_another_thread_while_events_come(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    stopping = threading.Event()
    texts: list[bytes] = []

    def read() -> None:
        while not stopping.is_set():
            texts.append(generate_latest(registry))

    async with Provider.open(tmp_path) as provider:
        provider.register_metrics(registry)
        reading = asyncio.create_task(asyncio.to_thread(read))
        subscription = await provider.subscribe("s", "n/*", _ignore)
        for number in range(200):
            await provider.publish(StreamId("n", str(number)), b"x")
        await subscription.caught_up()
        await until(lambda: len(texts) > 3)
        stopping.set()
        await reading
        counts = [parsed(text).get(("headrace_delivered_events_total", *S), 0) for text in texts]
        assert counts == sorted(counts)
