"""`explain_stream` and the RPC name injected faults of real providers and silos."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace import Event, OnFailure, Provider, RetryPolicy, Start, StreamId
from headrace.adapters import QueueReceiver
from headrace.proto.v1 import observation_pb2 as pb
from headrace.server.config import GrpcConfig
from headrace.silo import last_event
from headrace.silo.config import ProviderConfig, SiloConfig
from headrace.silo.why_gathering import explain_stream
from headrace.streams.identity import SequenceToken
from headrace.streams.subscriptions import DeadLetter, Selector, SubscriptionDefinition
from tests.silo.clusters import clustered, queues
from tests.silo.services.calling import Allowed, Caller, Refused, batch, connecting, make_tokens, opened
from tests.silo.test_damage import damage

STREAM = StreamId("shop", "1")
ONCE = RetryPolicy(max_attempts=1)
LATER = RetryPolicy(initial_delay_s=100, max_delay_s=1000, max_elapsed_s=10_000, max_attempts=8)
TRIES = 1000


async def fail(event: Event) -> None:
    raise ValueError("no such customer")


async def never(event: Event) -> None:
    await asyncio.Event().wait()


async def take(event: Event) -> None: ...


async def evidence(provider: Provider, code: str, stream: StreamId = STREAM, name: str = "s") -> str:
    """Wait until `code` is the first cause, and return its evidence."""
    codes: Sequence[str] = ()
    for _ in range(TRIES):
        (one,) = await explain_stream(provider, stream, name)
        codes = [cause.code for cause in one.causes]
        if codes[0] == code:
            return one.causes[0].evidence
        await asyncio.sleep(0.01)
    raise AssertionError(f"{codes} instead of {code}")


async def test_a_paused_stream_is_named_with_its_failure(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.subscribe("s", "shop/*", fail, on_failure=OnFailure.PAUSE, retry=ONCE)
        await provider.publish(STREAM, b"x")
        assert "no such customer" in await evidence(provider, "stream_paused")


async def test_a_paused_stream_is_named_while_no_process_serves_it(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.subscribe("s", "shop/*", fail, on_failure=OnFailure.PAUSE, retry=ONCE)
        await provider.publish(STREAM, b"x")
        await evidence(provider, "stream_paused")
    async with Provider.open(tmp_path, queues=1) as provider:
        assert "no such customer" in await evidence(provider, "stream_paused")


async def test_a_retry_is_named_with_attempt_and_failure(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.subscribe("s", "shop/*", fail, retry=LATER)
        await provider.publish(STREAM, b"x")
        text = await evidence(provider, "stream_retrying")
        assert text.startswith("attempt 1 of 8 failed")
        assert "no such customer" in text


async def test_a_handler_that_does_not_end_is_named(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        subscription = await provider.subscribe("s", "shop/*", never)
        await provider.publish(STREAM, b"x")
        await evidence(provider, "handler_running")
        await provider.withdraw(subscription.name, 0)


async def test_a_dead_letter_is_named_with_its_reason(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.subscribe("s", "shop/*", fail, retry=ONCE)
        await provider.publish(STREAM, b"x")
        assert "no such customer" in await evidence(provider, "dead_lettered")


async def test_a_dead_letter_is_found_behind_many_others(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.subscribe("s", "shop/*", fail, retry=ONCE)
        other, at = StreamId("shop", "other"), SequenceToken
        others = [DeadLetter(0, "default", "s", 0, other, at(9, n), b"", {}, None, 0, "x", 1, 0) for n in range(1100)]
        await provider.store.add_dead_letters(others, None)
        await provider.publish(STREAM, b"x")
        assert "no such customer" in await evidence(provider, "dead_lettered")


async def test_finished_events_are_not_pending(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.subscribe("s", "shop/*", take)
        await provider.publish(STREAM, b"x")
        await evidence(provider, "nothing_pending")
        await evidence(provider, "no_such_stream", StreamId("shop", "2"))


async def test_nothing_is_pending_in_a_queue_that_is_read_to_its_end_and_cannot_be_searched(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, adapter="memory", queues=1) as provider:
        await provider.subscribe("s", "shop/1", fail, retry=ONCE)
        subscription = await provider.subscribe("t", "shop/*", take)
        assert await evidence(provider, "nothing_pending") == (
            "queue 0: no event from offset 0 on, everything below 0 is done"
        )
        await provider.publish(STREAM, b"x")
        await provider.publish(StreamId("shop", "2"), b"x")
        await subscription.caught_up()
        await evidence(provider, "nothing_pending", StreamId("shop", "mistyped"), "t")
        assert "the last dead letter of the stream: dead letter 1" in await evidence(provider, "nothing_pending")


async def test_a_stream_is_looked_for_from_the_end_of_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_event, "FIRST_WINDOW", 2)
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.subscribe("s", "shop/*", take)
        await provider.publish(STREAM, b"x")
        for number in range(30):
            await provider.publish(StreamId("shop", "other"), b"%d" % number)
        assert await evidence(provider, "nothing_pending") == (
            "queue 0: last event at offset 0, everything below 31 is done"
        )
        opened, late = provider.adapter.open_receiver, asyncio.Event()

        async def slow_below_10(queue: int, offset: int) -> QueueReceiver:
            if offset < 10:
                await late.wait()
            return await opened(queue, offset)

        monkeypatch.setattr(provider.adapter, "open_receiver", slow_below_10)
        assert await evidence(provider, "nothing_pending") == (
            "queue 0: no event from offset 21 on, everything below 31 is done"
        )


async def test_the_last_dead_letter_is_shown_if_the_search_does_not_come_to_its_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_event, "FIRST_WINDOW", 2)
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.subscribe("s", "shop/1", fail, retry=ONCE)
        await provider.publish(STREAM, b"x")
        for number in range(30):
            await provider.publish(StreamId("shop", "other"), b"%d" % number)
        assert "no such customer" in await evidence(provider, "dead_lettered")
        opened = provider.adapter.open_receiver

        async def slow_below_10(queue: int, offset: int) -> QueueReceiver:
            if offset < 10:
                await asyncio.Event().wait()
            return await opened(queue, offset)

        monkeypatch.setattr(provider.adapter, "open_receiver", slow_below_10)
        (found,) = await explain_stream(provider, STREAM, "s")
        assert [cause.code for cause in found.causes] == ["nothing_pending"]
        assert "the last dead letter of the stream: dead letter 1, 1 attempts: " in found.causes[0].evidence


async def test_receivers_that_close_slowly_take_no_time_of_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        subscription = await provider.subscribe("s", "shop/*", fail, retry=ONCE)
        await provider.publish(STREAM, b"x")
        await subscription.caught_up()
        opened, closes = provider.adapter.open_receiver, asyncio.Event()

        async def closing_slowly(queue: int, offset: int) -> QueueReceiver:
            receiver = await opened(queue, offset)
            close = receiver.aclose

            async def aclose() -> None:
                await closes.wait()
                await close()

            monkeypatch.setattr(receiver, "aclose", aclose)
            return receiver

        monkeypatch.setattr(provider.adapter, "open_receiver", closing_slowly)
        (of_stream,) = await explain_stream(provider, STREAM, "s")
        (of_other,) = await explain_stream(provider, StreamId("shop", "mistyped"), "s")
        closes.set()
        assert [cause.code for cause in of_stream.causes] == ["dead_lettered"]
        assert [cause.code for cause in of_other.causes] == ["no_such_stream"]


@pytest.mark.parametrize(("call", "code"), [("dead_letters_at", "nothing_pending"), ("gaps", "dead_lettered")])
async def test_a_control_store_that_does_not_tell_what_was_given_up_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: str
) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        subscription = await provider.subscribe("s", "shop/*", fail, retry=ONCE)
        await provider.publish(STREAM, b"x")
        await subscription.caught_up()

        async def no_answer(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(provider.store, call, no_answer)
        (found,) = await explain_stream(provider, STREAM, "s")
        assert [cause.code for cause in found.causes] == ["store_unreachable", code]


@pytest.mark.parametrize("window", [4096, 2])
async def test_damage_before_the_event_is_named_however_far_the_event_is_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(last_event, "FIRST_WINDOW", window)
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.create_subscription(
            SubscriptionDefinition(name="s", selector=Selector("shop/*"), start=Start.earliest())
        )
        for number in range(30):
            await provider.publish(StreamId("shop", "other"), b"%d" % number)
        await provider.publish(STREAM, b"x")
    await asyncio.to_thread(damage, tmp_path, 5)
    async with Provider.open(tmp_path, queues=1) as provider:
        (found,) = await explain_stream(provider, STREAM, "s")
        assert [cause.code for cause in found.causes] == ["corrupt_record", "not_served"]


async def test_a_subscription_without_handler_and_consumer_is_not_served(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.create_subscription(SubscriptionDefinition(name="s", selector=Selector("shop/*")))
        await provider.publish(STREAM, b"x")
        await evidence(provider, "not_served")


async def test_missing_subscriptions_and_patterns_are_named(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.create_subscription(SubscriptionDefinition(name="s", selector=Selector("flights/*")))
        await provider.publish(STREAM, b"x")
        assert "'flights/*'" in await evidence(provider, "pattern_does_not_match")
        assert "'flights/*'" in await evidence(provider, "no_subscription", name="")
        assert await evidence(provider, "subscription_missing", name="other") == "no subscription 'other'"


async def test_a_consumer_that_does_not_acknowledge_is_named(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider, provider.subscribe("s", "shop/*") as consumer:
        await provider.publish(STREAM, b"x")
        async for _ in consumer:
            assert consumer.id in await evidence(provider, "consumer_silent")
            break


async def test_a_stopped_agent_is_named(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.subscribe("s", "shop/*", take)
        await provider.manager.queue_host.stop_agents([0], 1.0)
        await provider.publish(STREAM, b"x")
        await evidence(provider, "agent_stopped")


async def ask(
    caller: Caller, name: str = "", stream: StreamId = STREAM, queues: Sequence[int] = ()
) -> dict[str, list[tuple[str, str]]]:
    request = pb.ExplainStreamRequest(subscription=name, queues=queues)
    request.stream.namespace, request.stream.key = stream.namespace, stream.key
    answer = await caller.ask("headrace.v1.ObservationService/ExplainStream", request, pb.ExplainStreamResponse)
    return {one.subscription: [(each.code, each.evidence) for each in one.causes] for one in answer.explanations}


async def test_a_silo_explains_a_stream(tmp_path: Path) -> None:
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        await silo.providers["default"].subscribe("bills", "shop/*", fail, retry=LATER)
        await caller.publish(batch("shop/1", b"a"))
        await evidence(silo.providers["default"], "stream_retrying", name="bills")
        found = await ask(caller)
        assert [code for code, _ in found["bills"]] == ["stream_retrying"]
        assert [code for code, _ in (await ask(caller, "none"))[""]] == ["subscription_missing"]
        with pytest.raises(Refused, match="only silos give them"):
            await ask(caller, queues=[0])


async def test_a_tenant_learns_only_of_its_own_streams_and_subscriptions(tmp_path: Path) -> None:
    tokens = await make_tokens(
        tmp_path,
        all=Allowed(publish=["*"], subscribe=["*"], manage=["*"]),
        shop=Allowed(subscribe=["shop"]),
        other=Allowed(subscribe=["other"]),
    )
    async with opened(tmp_path, auth="tokens") as silo:
        address, provider = silo.grpc_address or "", silo.providers["default"]
        await provider.subscribe("all", "*/*", take)
        await provider.subscribe("mine", "shop/*", take)
        async with connecting(address, tokens["all"]) as caller:
            await caller.publish(batch("shop/1", b"a"))
            await evidence(provider, "nothing_pending", name="mine")
            found = await ask(caller)
            assert set(found) == {"all", "mine"}
            assert "offset" in found["mine"][0][1]
        async with connecting(address, tokens["shop"]) as caller:
            assert await ask(caller) == {"mine": [("nothing_pending", "")]}
            assert [code for code, _ in (await ask(caller, "all"))[""]] == ["subscription_missing"]
        async with connecting(address, tokens["other"]) as caller:
            with pytest.raises(Refused, match="PERMISSION_DENIED"):
                await ask(caller)


async def test_a_tenant_learns_no_offset_of_a_damaged_record_of_others(tmp_path: Path) -> None:
    tokens = await make_tokens(tmp_path, shop=Allowed(subscribe=["shop"]))
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.subscribe("mine", "shop/*", take, start="earliest")
        await provider.withdraw("mine")
        for number in range(10):
            await provider.publish(StreamId("other", "1"), b"%d" % number)
        await provider.publish(STREAM, b"x")
    await asyncio.to_thread(damage, tmp_path, 5)
    async with opened(tmp_path, auth="tokens", provider={"queues": 1}) as silo:
        provider = silo.providers["default"]
        await provider.subscribe("mine", "shop/*", take, start="earliest")
        for _ in range(TRIES):
            if provider.manager.agents[0].fault_of("mine"):
                break
            await asyncio.sleep(0.01)
        async with connecting(silo.grpc_address or "", tokens["shop"]) as caller:
            found = dict((await ask(caller))["mine"])
            assert found["corrupt_record"] == ""
            assert all("offset" not in text and str(tmp_path) not in text for text in found.values())


@pytest.mark.long
@pytest.mark.parametrize("several", [False, True])
async def test_any_silo_of_a_cluster_asks_the_owner_of_each_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """`several`: each queue may have events of each stream."""
    config = SiloConfig(
        data=str(tmp_path), drain_s=1, grpc=GrpcConfig(port=0), providers={"default": ProviderConfig(queues=4)}
    )
    async with clustered(config, 2) as silos, connecting(silos[0].grpc_address or "") as caller:
        for silo in silos:
            await silo.providers["default"].subscribe("bills", "shop/*", fail, retry=LATER)
        keys = {silos[0].providers["default"].queues_with(StreamId("shop", str(key)))[0]: str(key) for key in range(50)}
        for queue in range(4):
            await caller.publish(batch(f"shop/{keys[queue]}", b"a"))
        if several:

            def all_queues(stream: StreamId) -> Sequence[int]:
                return range(4)

            monkeypatch.setattr(silos[0].providers["default"], "queues_with", all_queues)
        found: dict[str, list[tuple[str, str]]] = {}
        for queue in queues(silos[1]):
            for _ in range(TRIES):
                found = await ask(caller, stream=StreamId("shop", keys[queue]))
                if [code for code, _ in found["bills"]] == ["stream_retrying"]:
                    break
                await asyncio.sleep(0.01)
            assert "no such customer" in found["bills"][0][1]


@pytest.mark.long
@pytest.mark.parametrize("rounds", [10, pytest.param(50, marks=pytest.mark.slow)])
async def test_an_owner_that_explains_many_subscriptions_is_not_called_unreachable(tmp_path: Path, rounds: int) -> None:
    config = SiloConfig(
        data=str(tmp_path), drain_s=1, grpc=GrpcConfig(port=0), providers={"default": ProviderConfig(queues=2)}
    )
    async with clustered(config, 2) as silos, connecting(silos[0].grpc_address or "") as caller:
        owner = silos[1].providers["default"]
        (queue, *_) = queues(silos[1])
        keys = [str(key) for key in range(200) if owner.queue_of(StreamId("shop", str(key))) == queue]
        for _ in range(rounds):
            await asyncio.gather(*(owner.publish(StreamId("shop", keys[1 + at % 40]), b"x") for at in range(4000)))
        for number in range(30):
            await owner.create_subscription(SubscriptionDefinition(name=f"s{number}", selector=Selector("shop/*")))
        found = await ask(caller, stream=StreamId("shop", keys[0]))
        assert len(found) == 30
        assert {code for causes in found.values() for code, _ in causes}.isdisjoint(["owner_unreachable"])
