"""Managing subscriptions over gRPC: requests take effect, and callers learn nothing that they may not know."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from headrace import (
    DeadLetter,
    Event,
    GapRecord,
    OnFailure,
    RetryPolicy,
    Selector,
    SequenceToken,
    StreamId,
    SubscriptionDefinition,
)
from headrace.proto.v1 import consumer_pb2
from headrace.proto.v1 import subscriptions_pb2 as pb
from headrace.server.access import NoTokens, Permission, Principal
from headrace.silo.host import Silo
from headrace.silo.provider import Provider
from headrace.silo.service_limits import ServiceLimits
from headrace.silo.services.subscriptions import SubscriptionService
from headrace.silo.services.visible import VisibleBounds
from headrace.streams.subscriptions import of_consumer
from headrace.streams.wire import definition_of
from tests.client.consumers import until
from tests.silo.services.calling import (
    SUBSCRIPTIONS,
    Allowed,
    Caller,
    Refused,
    Stream,
    batch,
    connecting,
    make_tokens,
    offering,
    opened,
)

ONCE = RetryPolicy(max_attempts=1)


async def ask(caller: Caller, method: str, request: Message | bytes) -> Any:
    return await caller.ask(f"{SUBSCRIPTIONS}/{method}", request, getattr(pb, f"{method}Response"))


async def refused(caller: Caller, method: str, request: Message | bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        await ask(caller, method, request)
    return caught.value


def provider_of(silo: Silo) -> Provider:
    return silo.providers["default"]


# Definitions


async def test_a_subscription_is_created_once_and_got_as_it_is_stored(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        assert await caller.create("printer", "shop/*", start=pb.Start(earliest=True), mode=pb.MODE_BOUND)
        assert not await caller.create("printer", "shop/*", start=pb.Start(earliest=True), mode=pb.MODE_BOUND)
        found = await caller.get("printer")
        assert definition_of(found.definition) == await provider_of(silo).store.subscription("default", "printer")
        assert list(found.consumers) == []
        with pytest.raises(Refused, match=r"ALREADY_EXISTS \(definition_conflict\): .*mode is"):
            await caller.create("printer", "shop/*", start=pb.Start(earliest=True))


async def test_events_from_before_are_kept_for_it_from_where_it_starts(tmp_path: Path):
    async with opened(tmp_path, provider={"queues": 1}) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.publish(batch("shop/1", b"a"), batch("shop/1", b"b"))
        for name, start, expected in (
            ("all", pb.Start(earliest=True), 0),
            ("new", pb.Start(latest=True), 2),
            ("default", None, 2),
            ("long ago", pb.Start(time_us=1), 0),
            ("future", pb.Start(time_us=1 << 57), 2),
            ("token", pb.Start(token="1"), 1),
        ):
            await caller.create(name.replace(" ", "-"), "shop/1", start=start)
            (progress,) = (await caller.get(name.replace(" ", "-"))).progress
            assert (progress.queue, progress.next_offset, progress.watermark) == (0, expected, expected), name
            assert progress.end_offset == 2


def creating(name: str, selector: str, **fields: Any) -> pb.CreateSubscriptionRequest:
    return pb.CreateSubscriptionRequest(definition=pb.SubscriptionDefinition(name=name, selector=selector, **fields))


BAD: dict[str, tuple[Message | bytes, str]] = {
    "no definition": (pb.CreateSubscriptionRequest(), "definition.selector: '' selects no stream"),
    "a bad name": (creating("a b", "shop/*"), "'a b' is not a subscription name"),
    "a consumer's name": (creating("a~b", "shop/*"), "'a~b' is not a subscription name"),
    "an unknown mode": (creating("a", "shop/*", mode=9), "definition.mode: 9 is none of the known values"),
    "a filter": (creating("a", "shop/*", filter="shop:f"), "definition.filter names a function in the silo"),
    "no attempts": (
        creating("a", "shop/*", retry=pb.RetryPolicy(max_attempts=0)),
        "retry.max_attempts is a whole number from 1",
    ),
    "a token for many": (creating("a", "shop/*", start=pb.Start(token="7")), "a token is a position in one queue"),
    "a token past the end": (creating("a", "shop/1", start=pb.Start(token="7")), "token 7 is past the end"),
    "noise": (b"\xff\xff", "the request is no headrace.v1.CreateSubscriptionRequest"),
}


@pytest.mark.long
@pytest.mark.parametrize(("request_", "text"), BAD.values(), ids=BAD)
async def test_a_bad_definition_is_refused_with_the_field(tmp_path: Path, request_: Message | bytes, text: str):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        told = await refused(caller, "CreateSubscription", request_)
        assert (told.status, told.code) == ("INVALID_ARGUMENT", "invalid_argument")
        assert text in told.details
        assert await provider_of(silo).store.subscriptions("default") == []


async def test_a_list_continues_after_the_first_message(tmp_path: Path):
    limits = ServiceLimits(list_bytes=150)
    async with opened(tmp_path, service_limits=limits) as silo, connecting(silo.grpc_address or "") as caller:
        names = [f"s{number}" for number in range(7)]
        for name in names:
            await caller.create(name, "shop/*")
        listed: list[str] = []
        messages = 0
        while True:
            request = pb.ListSubscriptionsRequest(after_name=listed[-1] if listed else "")
            answer = await ask(caller, "ListSubscriptions", request)
            if not answer.definitions:
                break
            listed += [definition.name for definition in answer.definitions]
            messages += 1
        assert listed == names
        assert messages > 2


async def test_a_deleted_subscription_is_gone(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.create("printer", "shop/*")
        await ask(caller, "DeleteSubscription", pb.DeleteSubscriptionRequest(name="printer"))
        with pytest.raises(Refused, match=r"NOT_FOUND \(not_found\): .*'printer'"):
            await caller.get("printer")
        assert (await refused(caller, "DeleteSubscription", pb.DeleteSubscriptionRequest(name="printer"))).status == (
            "NOT_FOUND"
        )


async def test_a_subscription_that_another_silo_serves_is_moved_and_deleted(tmp_path: Path):
    async with opened(tmp_path) as silo, opened(tmp_path) as other, connecting(silo.grpc_address or "") as caller:
        await provider_of(other).subscribe("printer", "shop/*", nothing)
        resume = pb.ResumeStreamRequest(name="printer", namespace="shop", key="1")
        assert await ask(caller, "ResumeStream", resume) == pb.ResumeStreamResponse(resumed=False)
        seek = pb.SeekSubscriptionRequest(name="printer", to=pb.Start(earliest=True))
        await ask(caller, "SeekSubscription", seek)
        await ask(caller, "DeleteSubscription", pb.DeleteSubscriptionRequest(name="printer"))
        await until(lambda: not provider_of(other).manager.served)


async def nothing(event: Event) -> None: ...


# Positions


async def test_a_seek_moves_it_back_and_forth_and_it_is_delivered_again(tmp_path: Path):
    got: list[bytes] = []

    async def note(event: Event) -> None:
        got.append(event.payload)

    async with opened(tmp_path, provider={"queues": 1}) as silo, connecting(silo.grpc_address or "") as caller:
        await provider_of(silo).subscribe("printer", "shop/*", note)
        await caller.publish(batch("shop/1", b"a"))
        await ask(caller, "AwaitCaughtUp", pb.AwaitCaughtUpRequest(name="printer"))
        await ask(caller, "SeekSubscription", pb.SeekSubscriptionRequest(name="printer", to=pb.Start(earliest=True)))
        await ask(caller, "AwaitCaughtUp", pb.AwaitCaughtUpRequest(name="printer"))
        assert got == [b"a", b"a"]
        (progress,) = (await caller.get("printer")).progress
        assert (progress.next_offset, progress.end_offset, progress.streams_behind) == (1, 1, 0)

        await caller.create("idle", "shop/*")
        await ask(caller, "SeekSubscription", pb.SeekSubscriptionRequest(name="idle", to=pb.Start(time_us=0)))
        (progress,) = (await caller.get("idle")).progress
        assert progress.next_offset == 0
        told = await refused(
            caller, "SeekSubscription", pb.SeekSubscriptionRequest(name="idle", to=pb.Start(token="x"))
        )
        assert told.details.startswith("to.token: 'x' is not a token")


async def test_waiting_ends_when_another_silo_has_caught_up(tmp_path: Path):
    async with opened(tmp_path) as silo, opened(tmp_path) as other, connecting(silo.grpc_address or "") as caller:
        await caller.create("printer", "shop/*", start=pb.Start(earliest=True))
        await caller.publish(batch("shop/1", b"a"), batch("shop/2", b"b"))
        waiting = asyncio.create_task(ask(caller, "AwaitCaughtUp", pb.AwaitCaughtUpRequest(name="printer")))
        definition = await provider_of(silo).store.subscription("default", "printer")
        await provider_of(other).subscribe("printer", "shop/*", nothing, start=definition.start)
        await waiting


async def test_waiting_ends_at_the_deadline_and_when_the_silo_stops(tmp_path: Path):
    async def until_open(calls: int) -> None:
        while b"\nheadrace_grpc_calls %d.0\n" % calls not in (await silo.metrics()).body:
            pass

    method, request = f"{SUBSCRIPTIONS}/AwaitCaughtUp", pb.AwaitCaughtUpRequest(name="printer")
    async with AsyncExitStack() as clients, AsyncExitStack() as silos:
        silo = await silos.enter_async_context(opened(tmp_path))
        caller = await clients.enter_async_context(connecting(silo.grpc_address or ""))
        await caller.create("printer", "shop/*", start=pb.Start(earliest=True))
        await caller.publish(batch("shop/1", b"a"))
        with pytest.raises(Refused, match="DEADLINE_EXCEEDED"):
            await caller.ask(method, request, pb.AwaitCaughtUpResponse, timeout=0.1)
        await until_open(0)
        waiting = asyncio.create_task(caller.ask(method, request, pb.AwaitCaughtUpResponse))
        await until_open(1)
        await silos.aclose()
        with pytest.raises(Refused, match=r"UNAVAILABLE \(unavailable\): the silo stops"):
            await waiting


class RevokedDuringCall(NoTokens):
    """Its token is valid when a call begins, and not any more while the call is open."""

    def authenticate(self, authorization: str | bytes | None) -> Principal:
        return Principal.of("shop", {Permission.SUBSCRIBE: ["shop"]})

    def still_valid(self, principal: Principal) -> bool:
        return False


async def test_waiting_ends_when_the_token_is_revoked(tmp_path: Path):
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.create_subscription(SubscriptionDefinition(name="printer", selector=Selector("shop/*")))
        await provider.publish(StreamId("shop", "1"), b"a")
        methods = SubscriptionService({"default": provider}, {}, VisibleBounds()).methods()
        async with offering(*methods, authenticator=RevokedDuringCall()) as caller:
            method, request = f"{SUBSCRIPTIONS}/AwaitCaughtUp", pb.AwaitCaughtUpRequest(name="printer")
            with pytest.raises(Refused, match=r"UNAUTHENTICATED .*: the token was revoked while the call was open"):
                await caller.ask(method, request, pb.AwaitCaughtUpResponse, timeout=5)


@pytest.mark.parametrize("served", [True, False])
async def test_a_paused_stream_goes_on_when_it_is_resumed(tmp_path: Path, served: bool):
    fails = True
    got: list[bytes] = []

    async def note(event: Event) -> None:
        if fails:
            raise ValueError("no")
        got.append(event.payload)

    resume = pb.ResumeStreamRequest(name="printer", namespace="shop", key="1")
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        subscribe = partial(
            provider_of(silo).subscribe, "printer", "shop/*", note, retry=ONCE, on_failure=OnFailure.PAUSE
        )
        subscription = await subscribe()
        await caller.publish(batch("shop/1", b"a"))
        await ask(caller, "AwaitCaughtUp", pb.AwaitCaughtUpRequest(name="printer"))
        fails = False
        other = pb.ResumeStreamRequest(name="printer", namespace="shop", key="2")
        if not served:
            await subscription.close()
        assert not (await ask(caller, "ResumeStream", other)).resumed
        assert (await ask(caller, "ResumeStream", resume)).resumed
        if not served:
            await subscribe()
        await ask(caller, "AwaitCaughtUp", pb.AwaitCaughtUpRequest(name="printer"))
        assert got == [b"a"]


# Mode broadcast: each consumer has a position of its own


async def test_of_a_broadcast_the_consumers_are_seen_and_the_position_of_the_last_one(tmp_path: Path):
    definition = pb.SubscriptionDefinition(
        name="news", selector="shop/1", mode=pb.MODE_BROADCAST, start=pb.Start(earliest=True)
    )
    async with opened(tmp_path, provider={"queues": 1}) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.publish(batch("shop/1", b"a"))
        sessions: list[Stream] = []
        for consumer in ("c1", "c2"):
            session = caller.stream("headrace.v1.ConsumerService/Subscribe")
            await session.write(
                consumer_pb2.SubscribeRequest(open=consumer_pb2.Open(definition=definition, consumer=consumer))
            )
            await session.read(consumer_pb2.SubscribeResponse)
            sessions.append(session)
        found = await caller.get("news")
        assert [(each.id, each.connected) for each in found.consumers] == [("c1", True), ("c2", True)]
        assert [(each.watermark, each.end_offset) for each in found.progress] == [(0, 1)]
        listed = await ask(caller, "ListSubscriptions", b"")
        assert [each.name for each in listed.definitions] == ["news"]

        await add_letters(silo, letter(1, b"1", "news~c1"), letter(2, b"2", "news~c2"))
        letters = await ask(caller, "ListDeadLetters", pb.ListDeadLettersRequest(subscription="news"))
        assert [(each.subscription, each.payload) for each in letters.dead_letters] == [("news", b"1"), ("news", b"2")]
        everything = pb.DeleteDeadLettersRequest(subscription="news", all=True)
        assert (await ask(caller, "DeleteDeadLetters", everything)).count == 2

        await ask(caller, "SeekSubscription", pb.SeekSubscriptionRequest(name="news", to=pb.Start(latest=True)))
        await ask(caller, "AwaitCaughtUp", pb.AwaitCaughtUpRequest(name="news"))
        assert [each.watermark for each in (await caller.get("news")).progress] == [1]
        for session in sessions:
            session.cancel()


# Dead letters and gaps


def letter(number: int, payload: bytes = b"x", subscription: str = "printer") -> DeadLetter:
    return DeadLetter(
        0, "default", subscription, 0, StreamId("shop", "1"), SequenceToken(number, 2), payload, {"k": "v"}, None,
        5, "broken", 8, 6,
    )  # fmt: skip


async def add_letters(silo: Silo, *letters: DeadLetter) -> Sequence[int]:
    return await provider_of(silo).store.add_dead_letters(letters, None)


async def list_letters(caller: Caller, **fields: int) -> Sequence[pb.DeadLetter]:
    request = pb.ListDeadLettersRequest(subscription="printer")
    for name, value in fields.items():
        setattr(request, name, value)
    answer = await ask(caller, "ListDeadLetters", request)
    return answer.dead_letters


@pytest.mark.long
async def test_dead_letters_are_listed_redriven_and_deleted(tmp_path: Path):
    got: list[bytes] = []

    async def note(event: Event) -> None:
        got.append(event.payload)

    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.create("printer", "shop/*")
        ids = await add_letters(silo, *[letter(number, b"%d" % number) for number in range(3)])
        first, second, third = await list_letters(caller)
        assert [each.id for each in (first, second, third)] == list(ids)
        assert (first.namespace, first.key, first.offset, first.index, first.payload) == ("shop", "1", 0, 2, b"0")
        assert (first.reason, first.attempts, first.headers["k"], first.timestamp_us) == ("broken", 8, "v", 5)
        assert [each.id for each in await list_letters(caller, limit=1)] == [ids[0]]
        assert [each.id for each in await list_letters(caller, after_id=ids[0])] == list(ids[1:])

        redrive = pb.RedriveDeadLettersRequest(subscription="printer", ids=[ids[0], 1 << 63])
        assert (await ask(caller, "RedriveDeadLetters", redrive)).count == 1
        assert [each.redrive for each in await list_letters(caller)] == [True, False, False]
        definition = await provider_of(silo).store.subscription("default", "printer")
        await provider_of(silo).subscribe("printer", "shop/*", note, start=definition.start)
        while len(await list_letters(caller)) > 2:
            pass
        assert got == [b"0"]

        for wrong in (pb.DeleteDeadLettersRequest(), pb.DeleteDeadLettersRequest(ids=[1], all=True)):
            wrong.subscription = "printer"
            assert (await refused(caller, "DeleteDeadLetters", wrong)).status == "INVALID_ARGUMENT"
        many = pb.DeleteDeadLettersRequest(subscription="printer", ids=range(10_001))
        assert "ids: at most 10,000" in (await refused(caller, "DeleteDeadLetters", many)).details
        some = pb.DeleteDeadLettersRequest(subscription="printer", ids=[ids[1]])
        assert (await ask(caller, "DeleteDeadLetters", some)).count == 1
        everything = pb.DeleteDeadLettersRequest(subscription="printer", all=True)
        assert (await ask(caller, "DeleteDeadLetters", everything)).count == 1
        assert not await list_letters(caller)


async def test_a_list_of_large_dead_letters_is_cut_to_fit_a_message(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.create("printer", "shop/*")
        ids = await add_letters(silo, *[letter(number, bytes(1 << 20)) for number in range(10)])
        listed: list[int] = []
        while found := await list_letters(caller, limit=1000, after_id=listed[-1] if listed else 0):
            assert len(found) < 5
            listed += [each.id for each in found]
        assert listed == list(ids)


async def test_a_list_over_several_names_leaves_none_out(tmp_path: Path):
    limits = ServiceLimits(list_bytes=300, letters_at_once=3)
    async with opened(tmp_path, service_limits=limits) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.create("printer", "shop/*", mode=pb.MODE_BROADCAST)
        for consumer in ("c1", "c2"):
            definition = await provider_of(silo).store.subscription("default", "printer")
            await provider_of(silo).store.create_subscription("default", of_consumer(definition, consumer), {})
        names = ["printer~c1"] * 12 + ["printer~c2", "other", "printer~c1"] * 4
        ids = await add_letters(silo, *[letter(number, bytes(20), name) for number, name in enumerate(names)])
        listed: list[int] = []
        while found := await list_letters(caller, limit=1000, after_id=listed[-1] if listed else 0):
            listed += [each.id for each in found]
        assert listed == [each for each, name in zip(ids, names, strict=True) if name != "other"]


async def test_dead_letters_of_a_deleted_subscription_can_still_be_had(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.create("printer", "shop/*")
        await add_letters(silo, letter(1))
        await ask(caller, "DeleteSubscription", pb.DeleteSubscriptionRequest(name="printer"))
        assert len(await list_letters(caller)) == 1
        redrive = pb.RedriveDeadLettersRequest(subscription="printer")
        assert (await refused(caller, "RedriveDeadLetters", redrive)).status == "NOT_FOUND"
        everything = pb.DeleteDeadLettersRequest(subscription="printer", all=True)
        assert (await ask(caller, "DeleteDeadLetters", everything)).count == 1
        assert (await refused(caller, "DeleteDeadLetters", everything)).status == "NOT_FOUND"


@pytest.mark.parametrize("broadcast", [False, True])
async def test_a_tenant_gets_no_dead_letters_of_a_deleted_subscription_with_the_name_of_its_own(
    tmp_path: Path, broadcast: bool
):
    tokens = await make_tokens(
        tmp_path,
        admin=Allowed(subscribe=["*"], manage=["*"]),
        alice=Allowed(subscribe=["shop"], manage=["shop"]),
        bob=Allowed(subscribe=["bank"], manage=["bank"]),
    )
    name = "printer~c1" if broadcast else "printer"

    async def create(caller: Caller, selector: str) -> None:
        await caller.create("printer", selector, mode=pb.MODE_BROADCAST if broadcast else pb.MODE_SHARED)
        if broadcast:
            definition = await store.subscription("default", "printer")
            await store.create_subscription("default", of_consumer(definition, "c1"), {})

    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as channel:
        admin, alice, bob = (Caller(channel.channel, tokens[name]) for name in ("admin", "alice", "bob"))
        store = provider_of(silo).store
        await create(alice, "shop/*")
        hers = await add_letters(silo, letter(1, b"secret", name), letter(2, b"secret", name))
        redrive = pb.RedriveDeadLettersRequest(subscription="printer")
        assert (await ask(alice, "RedriveDeadLetters", redrive)).count == 2
        await ask(alice, "DeleteSubscription", pb.DeleteSubscriptionRequest(name="printer"))

        await create(bob, "bank/*")
        his = await add_letters(silo, letter(3, b"own", name)._replace(stream=StreamId("bank", "1")))
        everything = pb.ListDeadLettersRequest()
        for letters in (await list_letters(bob), (await ask(bob, "ListDeadLetters", everything)).dead_letters):
            assert [(each.id, each.payload) for each in letters] == [(his[0], b"own")]
        assert (await bob.get("printer")).dead_letters == 1
        assert (
            await refused(alice, "ListDeadLetters", named("ListDeadLetters", "printer"))
        ).status == "PERMISSION_DENIED"
        assert (await admin.get("printer")).dead_letters == 3
        assert [each.redrive for each in await list_letters(admin)] == [False] * 3

        for caller in (bob, admin):
            assert (await ask(caller, "RedriveDeadLetters", redrive)).count == 1
        redrive.ids.extend(hers)
        for caller in (bob, admin):
            assert (await ask(caller, "RedriveDeadLetters", redrive)).count == 0
        some = pb.DeleteDeadLettersRequest(subscription="printer", ids=hers)
        assert (await ask(bob, "DeleteDeadLetters", some)).count == 0
        assert (await ask(bob, "DeleteDeadLetters", named("DeleteDeadLetters", "printer"))).count == 1
        assert [each.payload for each in await list_letters(admin)] == [b"secret"] * 2
        assert (await ask(admin, "DeleteDeadLetters", some)).count == 2


async def test_gaps_are_listed_from_where_one_left_off(tmp_path: Path):
    limits = ServiceLimits(list_bytes=100)
    async with opened(tmp_path, service_limits=limits) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.create("printer", "shop/*")
        await provider_of(silo).store.add_gaps(
            [
                GapRecord("default", "printer", 1, stream, SequenceToken(low), SequenceToken(low + 1, 3), "gone", 9)
                for low, stream in enumerate([None, StreamId("shop", "1"), None, None, None, None])
            ]
        )
        found: list[pb.Gap] = []
        while True:
            answer = await ask(caller, "ListGaps", pb.ListGapsRequest(subscription="printer", skip=len(found)))
            if not answer.gaps:
                break
            found += answer.gaps
        assert [(gap.low_offset, gap.high_offset, gap.high_index) for gap in found] == [(n, n + 1, 3) for n in range(6)]
        assert [gap.HasField("stream") for gap in found] == [False, True, False, False, False, False]
        assert (found[1].stream.namespace, found[1].reason, found[1].at_us) == ("shop", "gone", 9)


# Rights

NAMED = {
    "GetSubscription": pb.GetSubscriptionRequest,
    "DeleteSubscription": pb.DeleteSubscriptionRequest,
    "SeekSubscription": pb.SeekSubscriptionRequest,
    "AwaitCaughtUp": pb.AwaitCaughtUpRequest,
    "ResumeStream": pb.ResumeStreamRequest,
    "ListDeadLetters": pb.ListDeadLettersRequest,
    "RedriveDeadLetters": pb.RedriveDeadLettersRequest,
    "DeleteDeadLetters": pb.DeleteDeadLettersRequest,
    "ListGaps": pb.ListGapsRequest,
}
TO_KNOW = ("GetSubscription", "AwaitCaughtUp")


def named(method: str, name: str) -> Message:
    request = NAMED[method]()
    field = "name" if "name" in request.DESCRIPTOR.fields_by_name else "subscription"
    setattr(request, field, name)
    if isinstance(request, pb.DeleteDeadLettersRequest):
        request.all = True
    return request


async def test_missing_and_forbidden_subscriptions_are_refused_in_the_same_words(tmp_path: Path):
    tokens = await make_tokens(
        tmp_path,
        everything=Allowed(publish=["*"], subscribe=["*"], manage=["*"]),
        mine=Allowed(publish=["*"], subscribe=["mine*"], manage=["mine*"]),
    )
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as channel:
        admin, limited = (Caller(channel.channel, tokens[name]) for name in ("everything", "mine"))
        await admin.create("secret-one", "secret/*")
        await admin.create("mixed-one", "*/*")
        await add_letters(silo, letter(1, subscription="deleted-one"))
        for method in NAMED:
            texts = {
                name: await refused(limited, method, named(method, name))
                for name in ("secret-one", "mixed-one", "deleted-one", "no-such-one")
            }
            assert {told.status for told in texts.values()} == {"PERMISSION_DENIED"}, method
            words = {told.details.replace(name, "NAME") for name, told in texts.items()}
            assert len(words) == 1, words
            assert "secret" not in words.pop()
            assert (await refused(admin, method, named(method, "no-such-one"))).status == "NOT_FOUND", method


async def test_a_conflict_with_a_hidden_subscription_reveals_nothing_about_it(tmp_path: Path):
    tokens = await make_tokens(
        tmp_path, everything=Allowed(subscribe=["*"]), mine=Allowed(subscribe=["mine"], manage=["mine"])
    )
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as channel:
        admin, limited = (Caller(channel.channel, tokens[name]) for name in ("everything", "mine"))
        await admin.create("taken", "secret/*", mode=pb.MODE_BOUND)
        with pytest.raises(Refused, match=r"PERMISSION_DENIED.* name 'taken' is taken") as caught:
            await limited.create("taken", "mine/*")
        assert "secret" not in caught.value.details
        assert "mode" not in caught.value.details
        with pytest.raises(Refused, match="PERMISSION_DENIED"):
            await limited.create("other", "*/*")
        assert await limited.create("own", "mine/*")


async def test_only_a_caller_for_all_streams_may_let_consumers_stop_the_queues(tmp_path: Path):
    tokens = await make_tokens(tmp_path, everything=Allowed(manage=["*"]), mine=Allowed(subscribe=["mine"]))
    throttle = {"slow_consumer": pb.SLOW_CONSUMER_THROTTLE}
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as channel:
        admin, limited = (Caller(channel.channel, tokens[name]) for name in ("everything", "mine"))
        with pytest.raises(Refused, match=r"PERMISSION_DENIED.* can stop the queues for all clients"):
            await limited.create("mine", "mine/*", **throttle)
        assert await admin.create("mine", "mine/*", **throttle)
        assert not await limited.create("mine", "mine/*", **throttle)
        with pytest.raises(Refused, match=r"PERMISSION_DENIED"):
            await limited.create("mine", "mine/1", **throttle)


async def test_each_caller_lists_the_subscriptions_that_it_may_see(tmp_path: Path):
    tokens = await make_tokens(
        tmp_path,
        admin=Allowed(subscribe=["*"]),
        reader=Allowed(subscribe=["orders"]),
        manager=Allowed(manage=["orders*"]),
        producer=Allowed(publish=["*"]),
    )
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as channel:
        callers = {name: Caller(channel.channel, token) for name, token in tokens.items()}
        for name, selector in (("a", "orders/*"), ("b", "orders-eu/*"), ("c", "secret/*"), ("d", "*/*")):
            await callers["admin"].create(name, selector)
        listed: dict[str, str] = {}
        assert (await refused(callers.pop("producer"), "ListSubscriptions", b"")).status == "PERMISSION_DENIED"
        for name, caller in callers.items():
            answer = await ask(caller, "ListSubscriptions", b"")
            listed[name] = "".join(definition.name for definition in answer.definitions)
        assert listed == {"admin": "abcd", "reader": "a", "manager": "ab"}


async def test_to_know_of_a_subscription_is_not_to_manage_it(tmp_path: Path):
    tokens = await make_tokens(tmp_path, reader=Allowed(subscribe=["orders"]), manager=Allowed(manage=["orders"]))
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as channel:
        reader, manager = (Caller(channel.channel, tokens[name]) for name in ("reader", "manager"))
        await reader.create("printer", "orders/*")
        for method in NAMED:
            if method in TO_KNOW:
                await ask(reader, method, named(method, "printer"))
            else:
                assert (await refused(reader, method, named(method, "printer"))).status == "PERMISSION_DENIED", method
        for method in sorted(NAMED, key=lambda method: method == "DeleteSubscription"):
            await ask(manager, method, named(method, "printer"))
        with pytest.raises(Refused, match="PERMISSION_DENIED"):
            await manager.get("printer")
