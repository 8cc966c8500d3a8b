"""Wrong arguments are refused at the call, in one line with the accepted values, by providers and clients alike."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportUnknownLambdaType=false

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from headrace import (
    CacheOptions,
    Client,
    DefinitionConflict,
    Event,
    EventBatch,
    HeadraceError,
    InvalidArgument,
    NotFound,
    NotSupported,
    OnFailure,
    ProducerSequence,
    Provider,
    ProviderOptions,
    ReceivedBatch,
    RetryPolicy,
    Selector,
    Start,
    StreamId,
    StreamProvider,
    SubscriptionDefinition,
    SyncClient,
    SyncStreamProvider,
    Tls,
    subscription,
)

S = StreamId("orders", "42")
NOWHERE = "127.0.0.1:1"


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with Provider.open(adapter="memory", queues=2) as opened:
        yield opened


@pytest.fixture(params=["provider", "client"])
async def either(request: pytest.FixtureRequest, provider: Provider) -> Any:
    """A provider here, and one elsewhere that is never asked."""
    return provider if request.param == "provider" else Client(NOWHERE)


async def on_event(event: Event) -> None: ...


async def on_batch(batch: EventBatch) -> None: ...


async def on_received(batch: ReceivedBatch) -> None: ...


async def on_unannotated_batch(batch) -> None: ...  # pyright: ignore[reportUnknownParameterType, reportMissingParameterType]


async def on_nothing() -> None: ...


async def on_two(event: Event, other: int) -> None: ...


async def on_anything(*anything: Any) -> None: ...


async def on_optional(event: Any, other: int = 2) -> None: ...


def blocking(event: Event) -> None: ...


class Unbatched:
    async def on_next(self, batch: EventBatch) -> None: ...


class Batched:
    async def on_next_batch(self, event: Event) -> None: ...


class Completed:
    async def on_next(self, event: Event) -> None: ...

    async def on_completed(self, event: Event) -> None: ...


class Observing:
    async def on_next(self, event: Event) -> None: ...


async def refused(call: Callable[[], Any], message: str, kind: type[HeadraceError] = InvalidArgument) -> None:
    with pytest.raises(kind, match=message) as caught:  # noqa: PT012 (it is raised by either)
        made = call()
        if inspect.isawaitable(made):
            await made
    assert "\n" not in str(caught.value)
    assert caught.value.code


HANDLERS: list[tuple[Any, dict[str, Any], str]] = [
    (on_nothing, {}, r"on_nothing\(\).* has the wrong arguments: expected one argument, event"),
    (on_two, {}, "on_two.* has the wrong arguments: expected one argument, event"),
    (on_two, {"batch": True}, "expected one argument, batch"),
    (on_batch, {}, "on_batch.* takes a batch: add batch=True"),
    (on_received, {}, "on_received.* takes a batch: add batch=True"),
    (on_unannotated_batch, {}, "takes a batch: add batch=True"),
    (on_event, {"batch": True}, "on_event.* takes an event: leave out batch=True"),
    (on_event, {"batch": "yes"}, "batch is 'yes': expected True or False"),
    (blocking, {}, "handler blocking is a plain function: write async def blocking"),
    (5, {}, "a handler is an async function .* not 5"),
    (Unbatched(), {}, "Unbatched.on_next.* takes a batch: name it on_next_batch"),
    (Batched(), {}, "Batched.on_next_batch.* takes an event: name it on_next"),
    (Completed(), {}, "Completed.on_completed.* has the wrong arguments: expected no arguments"),
    (Observing(), {"batch": True}, "batch=True is for a function"),
    (Observing, {}, "Observing is a class: give an instance of it"),
]


@pytest.mark.parametrize(("handler", "options", "message"), HANDLERS)
async def test_a_handler_that_cannot_be_called_is_refused(
    either: Any, handler: Any, options: dict[str, Any], message: str
) -> None:
    await refused(lambda: either.subscribe("s", "orders/*", handler, **options), message)
    await refused(lambda: subscription("s", "orders/*", **options)(handler), message)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"concurency": 2}, "subscribe: unknown option 'concurency': expected batch, .* did you mean 'concurrency'"),
    ({"concurrency": "2"}, "concurrency is '2': expected an integer of at least 1"),
    ({"concurrency": True}, "concurrency is True: expected an integer of at least 1"),
    ({"start": 5}, "start is 5: expected a Start, such as Start.earliest()"),
    ({"start": "yesterday"}, "'yesterday' is not a start: use earliest, latest"),
    ({"retry": {"max_attempts": 3}}, "retry is {'max_attempts': 3}: expected a RetryPolicy"),
    (
        {"on_failure": "pause"},
        "on_failure is 'pause': expected OnFailure.DEAD_LETTER, OnFailure.SKIP or OnFailure.PAUSE",
    ),
    ({"slow_consumer": "detach"}, "slow_consumer is 'detach': expected SlowConsumer.THROTTLE, .* or None"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
async def test_a_wrong_option_of_a_handler_is_refused(either: Any, options: dict[str, Any], message: str) -> None:
    await refused(lambda: either.subscribe("s", "orders/*", on_event, **options), message)


async def test_wrong_options_of_the_decorator_are_refused_in_its_line() -> None:
    await refused(partial(subscription, "mail~eu", "orders/*"), "'mail~eu' is not a subscription name")
    for options, message in OPTIONS[1:]:
        await refused(partial(subscription, "s", "orders/*", **options), message)
    await refused(partial(subscription, "s", "orders/*", queue=4), "subscription: unknown option 'queue'.* provider")
    await refused(partial(subscription, "s", "orders/*", filter=on_event), "a filter is a function of an Event")
    await refused(partial(subscription, "s", "orders/*", filter=lambda: True), "filter.* expected one argument, event")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_event": 2}, "subscribe: unknown option 'max_event': .*; did you mean 'max_events'"),
        ({"concurency": 2}, "subscribe: unknown option 'concurency': expected circuit_breaker, .* mean 'concurrency'"),
        ({"max_events": "2"}, "max_events is '2': expected an integer of at least 1"),
        ({"max_bytes": 0}, "max_bytes is 0: expected an integer of at least 1"),
        ({"consumer": 5}, "consumer is 5: expected a str"),
        ({"consumer": None}, "consumer is None: expected a str"),
        ({"mode": "bond"}, "'bond' is not a mode of a subscription: use one of 'shared', 'bound', 'broadcast'"),
        ({"session_timeout_s": "5"}, "session_timeout_s is '5': expected a number of seconds above 0"),
        ({"timeout_s": 0}, "timeout_s is 0: expected a number of seconds above 0"),
        ({"keeps_positions": 1}, "keeps_positions is 1: expected True or False"),
        ({"positions": [1], "keeps_positions": True}, "positions is .1.: expected a mapping"),
        ({"on_state": 5}, "on_state is 5: expected a function or None"),
        ({"on_gap": 5}, "on_gap is 5: expected a function or None"),
        ({"start": 5}, "start is 5: expected a Start"),
        ({"concurrency": 2}, "concurrency is for a handler, and there is none"),
        ({"batch": True, "concurrency": 2}, "batch and concurrency are for a handler, and there is none"),
    ],
)
async def test_a_wrong_option_of_a_consumer_is_refused(either: Any, options: dict[str, Any], message: str) -> None:
    await refused(lambda: either.subscribe("s", "orders/*", **options), message)


async def test_options_of_the_other_kind_are_refused(provider: Provider) -> None:
    consumer: dict[str, Any] = {"max_events": 5}
    await refused(lambda: provider.subscribe("s", "orders/*", on_event, **consumer), "max_events is for a consumer")
    unfiltered: dict[str, Any] = {"filter": bool}
    await refused(lambda: provider.subscribe("s", "orders/*", **unfiltered), "a filter is for a handler", NotSupported)


@pytest.mark.parametrize("handler", [None, on_event])
async def test_a_wrong_name_or_selector_is_refused(either: Any, handler: Any) -> None:
    await refused(lambda: either.subscribe(5, "orders/*", handler), "name is 5: expected a str")
    await refused(lambda: either.subscribe("a b", "orders/*", handler), "'a b' is not a subscription name")
    for name in ("mail~eu", "~", ""):  # the character is for the positions of the consumers of mode broadcast
        await refused(lambda name=name: either.subscribe(name, "orders/*", handler), f"'{name}' is not a subscription")
        await refused(lambda name=name: either.subscribe(name, handler=handler), f"'{name}' is not a subscription")
    await refused(lambda: either.subscribe("s", 5, handler), "selector is 5: expected a StreamId, or a str")
    await refused(lambda: either.subscribe("s", "orders", handler), "'orders' selects no stream")


CALLS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda p: p.seek("s", 5), "start is 5: expected a Start, such as"),
    (lambda p: p.seek("s", "yesterday"), "'yesterday' is not a start: use earliest, latest"),
    (lambda p: p.seek(5, "latest"), "name is 5: expected a str"),
    (lambda p: p.resume("s", "orders/1"), "stream is 'orders/1': expected a StreamId, such as"),
    (lambda p: p.resume(5, S), "name is 5: expected a str"),
    (lambda p: p.caught_up(5), "name is 5: expected a str"),
    (lambda p: p.subscription(5), "name is 5: expected a str"),
    (lambda p: p.delete_subscription(5), "name is 5: expected a str"),
    (lambda p: p.create_subscription("s"), "definition is 's': expected a SubscriptionDefinition"),
    (lambda p: p.dead_letters(5), "subscription is 5: expected a str"),
    (lambda p: p.dead_letters("s", limit="5"), "limit is '5': expected an integer"),
    (lambda p: p.dead_letters("s", after_id=None), "after_id is None: expected an integer"),
    (lambda p: p.redrive("s", "12"), "ids is '12': expected several integers, such as .1, 2., or None"),
    (lambda p: p.redrive("s", 12), "ids is 12: expected several integers"),
    (lambda p: p.redrive("s", ["a"]), "ids is .'a'.: expected several integers"),
    (lambda p: p.redrive(None), "subscription is None: expected a str"),
    (lambda p: p.delete_dead_letters("s", 12), "ids is 12: expected several integers"),
    (lambda p: p.gaps(5), "subscription is 5: expected a str"),
    (lambda p: p.pull(5, "one"), "name is 5: expected a str"),
    (lambda p: p.pull("s", 5), "consumer is 5: expected a str"),
    (lambda p: p.pull("s", "one", max_events="5"), "max_events is '5': expected an integer"),
    (lambda p: p.pull("s", "one", wait_s="5"), "wait_s is '5': expected a number of seconds"),
    (lambda p: p.pull("s", "one", after=[]), "not list"),
    (lambda p: p.acknowledge([]), "not list"),
    (lambda p: p.last_sequence(5), "producer: the id of a producer is text, not 5"),
    (lambda p: p.publish("orders/42", b"x"), "publish to a StreamId"),
    (lambda p: p.publish(S, 5), "publish bytes, str, Event, .* not 5"),
    (lambda p: p.publish(S, [5]), "."),
    (lambda p: p.publish(S, b"x", delay=5), "a delay is a timedelta .* not 5"),
    (lambda p: p.publish(S, b"x", priority="1"), "priority"),
    (lambda p: p.publish(S, b"x", priorty=3), "publish: unknown option 'priorty': .*; did you mean 'priority'"),
    (lambda p: p.publish(S), "publish: 'events' is missing: expected stream, events"),
    (lambda p: p.stream(S).publish(b"x", priorty=3), "Stream.publish: unknown option 'priorty': .* mean 'priority'"),
    (lambda p: p.publish_many([], sequnce=None), "publish_many: unknown option 'sequnce': .* mean 'sequence'"),
    (lambda p: p.subscribe("s", handler=on_event, start="latest"), "start is for a subscription that is created"),
    (
        lambda p: p.seek("s", position=1),
        "^(Provider|Client).seek: unknown option 'position': expected name(, reason)? or start$",
    ),
    (lambda p: p.seek("s", "latest", name="s"), "^(Provider|Client).seek: 'name' is given twice: leave out name='s'$"),
    (lambda p: p.pull("s", "one", max_event=1), "^(Provider|Client).pull: unknown option .* mean 'max_events'"),
    (lambda p: p.pull("s", "one", 5), "^(Provider|Client).pull: 5 has no name: write .*.pull.max_events=5.$"),
    (lambda p: p.pull(), "^(Provider|Client).pull: 'name' is missing: expected name, consumer$"),
    (lambda p: p.subscribe(handler=on_event), "^(Provider|Client).subscribe: 'name' is missing"),
    (lambda p: p.flush(1), "^(Provider|Client).flush: too many arguments .1.: expected none$"),
    (lambda p: p.flush(timeout_s=1), "^(Provider|Client).flush: unknown option 'timeout_s': expected none$"),
    (lambda p: p.publish_many([(S, b"x")], sequence=5), "sequence is 5: expected a ProducerSequence"),
    (lambda p: p.publish_many(5), "publish_many takes pairs"),
    (lambda p: p.stream("orders"), "a stream has a namespace and a key"),
    (lambda p: p.stream(5, "42"), "a stream's namespace is a string"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
async def test_a_wrong_argument_is_refused(either: Any, call: Callable[[Any], Awaitable[Any]], message: str) -> None:
    await refused(lambda: call(either), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": 4}, "Provider.open: unknown option 'queue': expected adapter, .*; did you mean 'queues'"),
        ({"queues": "8"}, "queues is '8': expected an integer from 1 to 1,024"),
        ({"queues": 0}, "queues is 0: expected an integer from 1 to 1,024"),
        ({"name": 5}, "name is 5: expected a str"),
        ({"name": "", "adapter": "memory"}, "'' is not a provider name: letters, digits, dot, dash and underscore"),
        ({"name": "\ud800", "adapter": "memory"}, r"'\\ud800' is not a provider name"),
        ({"adapter": 5}, "adapter is 5: expected a str"),
        ({"options": "url=x"}, "options is 'url=x': expected a mapping of the adapter's options"),
        ({"cache": 5}, "cache is 5: expected a CacheOptions"),
        ({"detach_after_s": "1"}, "detach_after_s is '1': expected a number of seconds"),
        ({"delays": 5}, "delays is 5: expected a str"),
        ({"data": 5}, "data is 5: expected the path of a directory, or None"),
        ({"data": b"d"}, "data is b'd': expected the path of a directory, or None"),
        ({"data": "a\0b"}, r"data is 'a\\x00b': expected the path of a directory, or None"),
        ({"data": "\ud800"}, r"data is '\\ud800': expected the path of a directory, or None"),
    ],
)
async def test_a_wrong_option_of_a_provider_is_refused_before_it_is_entered(
    options: dict[str, Any], message: str
) -> None:
    await refused(lambda: Provider.open(**options) and None, message)


@pytest.mark.parametrize("client", [Client, SyncClient])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": 5}, "address is 5: expected a str"),
        ({"provider": 5}, "provider is 5: expected a str"),
        ({"token": 5}, "token is 5: expected a str"),
        ({"tls": "yes"}, "tls is 'yes': expected True, False, None or a Tls"),
        ({"insecure": "no"}, "insecure is 'no': expected True or False"),
        ({"timeout_s": "5"}, "timeout_s is '5': expected a number of seconds above 0"),
        ({"connect_timeout_s": 0}, "connect_timeout_s is 0: expected a number of seconds above 0"),
        ({"linger_s": -1}, "linger_s is -1: expected a number of seconds of at least 0"),
    ],
)
async def test_a_wrong_option_of_a_client_is_refused(
    client: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    await refused(lambda: client(**{"address": NOWHERE, **options}) and None, message)


@pytest.mark.parametrize("client", [Client, SyncClient])
async def test_an_unknown_option_of_a_client_is_refused(client: Callable[..., Any]) -> None:
    unknown: dict[str, Any] = {"timeout": 3}
    await refused(lambda: client(NOWHERE, **unknown) and None, "Client: unknown option 'timeout'.* mean 'timeout_s'")
    await refused(lambda: client() and None, "Client: 'address' is missing")


@pytest.mark.parametrize("kind", [Provider, Client, SyncClient])
def test_every_method_of_a_provider_names_the_class_that_users_know(kind: Any) -> None:
    unopened = object.__new__(kind)
    for name in public(StreamProvider) - {"subscribe"}:
        with pytest.raises(InvalidArgument, match=f"^{kind.__name__}.{name}: unknown option 'bogus': expected "):
            getattr(unopened, name)(bogus=1)


async def test_a_subscription_with_a_handler_names_wrong_options(provider: Any) -> None:
    subscribed = await provider.subscribe("s", "orders/*", on_event)
    await refused(lambda: subscribed.seek(strat="latest"), "LocalSubscription.seek: unknown option 'strat'.* 'start'")


async def test_an_unknown_option_of_a_blocking_publish_is_refused() -> None:
    client: Any = SyncClient(NOWHERE)
    for publish in (partial(client.publish, S), client.stream(S).publish):
        await refused(lambda publish=publish: publish(b"x", priorty=3), "publish: unknown option 'priorty'")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RetryPolicy(max_attempts="3"), "retry.max_attempts is a whole number from 1 to .*, not '3'"),
        (lambda: RetryPolicy(max_delay_s="3"), "retry.max_delay_s is a number of seconds from 0 to .*, not '3'"),
        (lambda: Start.since("2026"), "when is '2026': expected a datetime"),
        (lambda: Start.at("yesterday"), "token"),
        (lambda: CacheOptions(max_bytes="1"), "cache.max_bytes is '1': expected an integer of at least 1"),
        (lambda: SubscriptionDefinition(name="s", selector="orders/*"), "selector is 'orders/.': expected a Selector"),
        (lambda: CacheOptions(max_event=3), "CacheOptions: unknown option 'max_event': .* did you mean 'max_events'"),
        (lambda: CacheOptions(3), r"CacheOptions: 3 has no name: write CacheOptions\(max_events=3\)"),
        (lambda: ProviderOptions(queue=3), "ProviderOptions: unknown option 'queue': .* did you mean 'queues'"),
        (lambda: RetryPolicy(max_attempt=3), "RetryPolicy: unknown option 'max_attempt': .* mean 'max_attempts'"),
        (
            lambda: SubscriptionDefinition("q", Selector("o/*")),
            r"SubscriptionDefinition: 'q' has no name: .*\(name='q', selector=Selector\(pattern='o/\*'\)\)",
        ),
        (lambda: SubscriptionDefinition(name="q"), "SubscriptionDefinition: 'selector' is missing"),
        (lambda: ProducerSequence("x", "1", 0), "number is a whole number above previous, .* not number '1' after"),
        (lambda: ProducerSequence(5, 1, 0), "producer is 5: expected a str"),
        (lambda: ProducerSequence("x", number=1), "ProducerSequence: 'previous' is missing"),
        (lambda: EventBatch.of(S, [Event(b"x", timestamp_us=True)]), "timestamp_us is True: expected an integer"),
        (
            lambda: EventBatch.of(S, [Event(b"x", timestamp_us=5), Event(b"x", timestamp_us=False)]),
            "timestamp_us is False: expected an integer",
        ),
        (lambda: subscription(on_event), "'?<function on_event.* has no selector: write @subscription"),
        (lambda: Tls(certificat=5), "Tls: unknown option 'certificat'"),
        (lambda: Tls(ca=5), "tls.ca is 5: expected the path of a PEM file, or its contents as bytes"),
    ],
)
async def test_a_value_of_a_wrong_type_is_refused_where_it_is_made(make: Callable[[], Any], message: str) -> None:
    await refused(lambda: make() and None, message)


async def test_handlers_of_other_shapes_are_accepted(provider: Provider) -> None:
    for number, handler in enumerate([on_anything, on_optional, partial(on_two, other=2), Observing().on_next]):
        await provider.subscribe(f"s{number}", "orders/*", handler)
    await provider.subscribe("batch", "orders/*", on_anything, batch=True)


async def test_a_subscription_that_exists_needs_no_selector(provider: Any) -> None:
    got = asyncio.Queue[bytes]()

    async def take(event: Event) -> None:
        got.put_nowait(event.payload)

    with pytest.raises(NotFound, match="s"):
        await provider.subscribe("s", handler=take)
    await provider.create_subscription(SubscriptionDefinition(name="s", selector=Selector("orders/*")))
    handled = await provider.subscribe("s", handler=take)
    assert handled.definition.selector == Selector("orders/*")
    await provider.publish(S, b"x")
    assert await got.get() == b"x"
    await handled.close()
    filtered = provider.subscribe("s", handler=take, filter=lambda _: True)
    with pytest.raises(DefinitionConflict, match="filter"):
        await filtered
    async with provider.subscribe("s") as consumer:
        assert consumer.definition.selector == Selector("orders/*")


async def test_subscribe_without_await_or_async_with_warns(either: Any) -> None:
    with pytest.warns(RuntimeWarning, match=r"coroutine '(provider|client).subscribe' was never awaited"):
        either.subscribe("s", "orders/*", on_event)
    with pytest.warns(RuntimeWarning, match=r"(provider|client).subscribe\('s', ...\) without a handler was never ent"):
        either.subscribe("s", "orders/*")


async def test_the_wrong_way_to_use_subscribe_says_the_right_one(either: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"has a handler: write `subscription = await .*subscribe\(...\)`"):
        async with either.subscribe("s", "orders/*", on_event):
            pass
    with pytest.raises(InvalidArgument, match="has no handler: give one, or take batches with `async with"):
        await either.subscribe("s", "orders/*")
    with pytest.raises(InvalidArgument, match="is not open: write `async with"):
        async for _ in either.subscribe("s", "orders/*"):
            pass


async def test_the_result_of_subscribe_is_a_coroutine(provider: Provider) -> None:
    made = await asyncio.create_task(provider.subscribe("s", "orders/*", on_event))
    assert made.name == "s"


def arguments(of: type, name: str) -> list[str]:
    return list(inspect.signature(getattr(of, name)).parameters)


def public(of: type) -> set[str]:
    return {name for name in dir(of) if callable(getattr(of, name)) and not name.startswith("_")}


def test_both_protocols_have_the_same_methods() -> None:
    assert public(StreamProvider) == public(SyncStreamProvider)
    for name in public(StreamProvider) - {"subscribe"}:
        assert arguments(StreamProvider, name) == arguments(SyncStreamProvider, name)


@pytest.mark.parametrize("kind", [Provider, Client, SyncClient])
def test_every_provider_has_the_methods_of_the_protocol(kind: type) -> None:
    for name in public(StreamProvider) - {"subscribe"}:
        expected = arguments(StreamProvider, name)
        assert arguments(kind, name)[: len(expected)] == expected, name


async def test_a_provider_manages_as_a_client_does(provider: Provider) -> None:
    failed = asyncio.Event()

    async def fail(event: Event) -> None:
        failed.set()
        raise ValueError("no")

    once = RetryPolicy(max_attempts=1)
    handled = await provider.subscribe("s", "orders/*", fail, retry=once, start="earliest")
    await provider.subscribe("skips", "orders/*", fail, retry=once, start="earliest", on_failure=OnFailure.SKIP)
    await provider.publish(S, b"x")
    await provider.flush()
    await provider.caught_up("s")
    await provider.caught_up("skips")
    (letter,) = await provider.dead_letters("s")
    assert letter.payload == b"x"
    assert [one.name for one in await provider.subscriptions()] == ["s", "skips"]
    assert (await provider.subscription("s")).dead_letters == 1
    assert [gap.stream for gap in await provider.gaps("skips")] == [S]
    failed.clear()
    assert await provider.redrive("s", [letter.id]) == 1
    await failed.wait()
    async with asyncio.timeout(20):
        while (again := (await provider.dead_letters("s"))[0]).redrive:  # noqa: ASYNC110 (another task stores it)
            await asyncio.sleep(0)
    assert again.failed_at_us > letter.failed_at_us
    assert await provider.delete_dead_letters("s") == 1
    assert not await handled.resume(S)


async def test_a_provider_pulls_as_a_client_does(provider: Provider) -> None:
    async with provider.subscribe("s", "orders/*", start="earliest"):
        pass
    await provider.publish(S, [b"a", b"b"])
    pulled = await provider.pull("s", "one", wait_s=5)
    assert [batch.payloads() for batch in pulled] == [[b"a", b"b"]]
    await refused(lambda: pulled[0].ack(5), "event is 5: expected an Event of this batch, or its token")
    await refused(lambda: pulled[0].ack_until("a"), "event is 'a': expected an Event")
    await refused(lambda: pulled[0].nack("no", event=0), "event is 0: expected an Event")
    await refused(lambda: pulled[0].nack("no", delay=5), "the delay of a rejection is a timedelta, not 5")
    for batch in pulled:
        await batch.ack()
    assert await provider.acknowledge(pulled) == 0
    await provider.caught_up("s")


async def test_flush_waits_for_earlier_publishes(provider: Provider) -> None:
    stopped: Any = Stopped(provider.adapter)
    provider.adapter = stopped
    publishing = asyncio.create_task(provider.publish(S, b"x", delay=timedelta(0)))
    await stopped.reached.wait()
    flushing = asyncio.create_task(provider.flush())
    await asyncio.sleep(0)
    assert not flushing.done()
    stopped.released.set()
    await flushing
    assert publishing.done()


class Stopped:
    """An adapter that stores nothing until it is released."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.reached = asyncio.Event()
        self.released = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    async def enqueue(self, *given: Any, **options: Any) -> Any:
        self.reached.set()
        await self.released.wait()
        return await self._adapter.enqueue(*given, **options)
