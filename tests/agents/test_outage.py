"""An outage of a consumer's dependencies: nothing becomes a dead letter, and nothing is overrun at its end. In virtual
time."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from headrace import Event, EventBatch, OnFailure, RetryPolicy, Unavailable
from headrace.agents.delivery.breaker import FIRST_STEP, MAX_PROBE_S, MAX_STEP_S, Gate
from tests.simulation.deliveries import HandlerFeed, Sink
from tests.simulation.groups import Consumer, SimulatedGroup
from tests.simulation.virtual_time import virtual_time

HOUR_S = 3600.0
FAILING_TAKES_S = 0.05


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace.agents")


class Database:
    """What a handler depends on. It refuses poison, and everything while it is down."""

    def __init__(self, poison: Sequence[str] = (), error: type[Exception] = ConnectionError) -> None:
        self.down = False
        self.attempts: list[float] = []
        """When each was made."""
        self.stored: list[str] = []
        self.harmless: Callable[[str], bool] = lambda _: False
        """Which payloads need no database."""
        self._poison = frozenset(poison)
        self._error = error

    async def store(self, event: Event) -> None:
        payload = event.payload.decode()
        self.attempts.append(now())
        if payload in self._poison:
            raise ValueError(payload)
        if self.down and not self.harmless(payload):
            await asyncio.sleep(FAILING_TAKES_S)
            raise self._error("connection refused")
        self.stored.append(payload)

    async def store_all(self, batch: EventBatch) -> None:
        for event in batch.events():
            await self.store(event)

    def attempts_between(self, begin: float, end: float) -> int:
        return sum(begin <= at < end for at in self.attempts)


def now() -> float:
    return asyncio.get_running_loop().time()


def keys(count: int) -> list[str]:
    return [f"k{number}" for number in range(count)]


@asynccontextmanager
async def lines(
    database: Database, queues: int = 1, *, batch: bool = False, circuit_breaker: bool = True, **options: object
) -> AsyncGenerator[list[HandlerFeed]]:
    """A subscription to some queues."""
    gate, sink = Gate("sub", enabled=circuit_breaker), Sink()
    handler = database.store_all if batch else database.store
    made = [
        HandlerFeed(
            handler,
            batch=batch,
            gate=gate,
            sink=sink,
            max_events=1_000_000,
            **{"retry": RetryPolicy(), **options},  # type: ignore[arg-type]
        )
        for _ in range(queues)
    ]
    async with AsyncExitStack() as stack:
        for line in made:
            await stack.enter_async_context(line)
        yield made


# ---- many streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "streams"), [(False, 100_000), (True, 20_000)])
@virtual_time
async def test_an_hour_of_outage_leaves_no_dead_letter_and_ends_without_a_herd(batch: bool, streams: int) -> None:
    database, queues = Database(), 4
    async with lines(database, queues, batch=batch) as made:
        database.down = True
        began = now()
        for number, line in enumerate(made):
            line.publish_all((key, f"{number}.{key}".encode()) for key in keys(streams // queues))
        await asyncio.sleep(10)
        held = made[0].delivery.gate.held
        assert held is not None
        assert held.reason == "ConnectionError: connection refused"
        await asyncio.sleep(HOUR_S - 10)
        assert database.attempts_between(began + 10, now()) <= (HOUR_S - 10) / MAX_PROBE_S + 1
        database.down = False
        ended = now()
        for line in made:
            await line.done()
        assert made[0].sink.dead == []
        assert sorted(database.stored) == sorted(f"{n}.{key}" for n in range(queues) for key in keys(streams // queues))

        first = next(at for at in database.attempts if at >= ended)
        assert first - ended <= MAX_PROBE_S
        rate = Counter(int(at - first + 1e-6) for at in database.attempts if at >= ended)
        assert all(count <= FIRST_STEP * 2**second + (second == 0) for second, count in rate.items())
        assert max(rate) <= 15
        await asyncio.sleep(2 * MAX_STEP_S)
        assert made[0].delivery.gate.held is None


@pytest.mark.long
@pytest.mark.parametrize("max_attempts", [1, 2, 8])
@virtual_time
async def test_poison_is_given_up_on_after_an_outage_and_nothing_else(max_attempts: int) -> None:
    poison = keys(500)[::17]
    database = Database(poison)
    retry = RetryPolicy(max_attempts=max_attempts)
    async with lines(database, 2, retry=retry) as (one, other):
        one.publish_all((key, b"before " + key.encode()) for key in keys(100))
        await one.done()
        database.down = True
        # Of a policy with one attempt, the breaker can only know after the first events were given up on.
        few = 4 if max_attempts == 1 else 0
        one.publish_all((key, key.encode()) for key in keys(500))
        other.publish_all((key, b"other " + key.encode()) for key in keys(500))
        await asyncio.sleep(HOUR_S)
        assert len(one.sink.dead) <= few
        database.down = False
        await one.done()
        await other.done()
        given_up = {payload.decode() for payload, _, _ in one.sink.dead}
        assert given_up >= set(poison) - set(database.stored)
        assert len(given_up - set(poison)) <= few
        assert len(database.stored) == 100 + 1000 - len(given_up)


@pytest.mark.long
@pytest.mark.parametrize(("fine", "bad"), [(7, 6), (45, 40), (4000, 100)])
@pytest.mark.parametrize("outage_s", [5.0, HOUR_S])
@virtual_time
async def test_poison_that_is_left_on_several_streams_after_an_outage_is_given_up_on(
    fine: int, bad: int, outage_s: float
) -> None:
    """The poison is last in line: when it is tried again, no other stream is left that could succeed."""
    poison = [f"p{number}" for number in range(bad)]
    database = Database(poison)
    async with lines(database) as (line,):
        database.down = True
        line.publish_all((key, key.encode()) for key in keys(fine))
        line.publish_all((key, key.encode()) for key in poison)
        await asyncio.sleep(outage_s)
        assert line.delivery.gate.held is not None
        database.down = False
        await asyncio.sleep(HOUR_S)
        if fine == 4000:  # too many to be tried before the hold: what fails for the first time after it is new
            line.publish("new", b"new")
        else:
            assert line.delivery.gate.held is None
        await line.done()
        assert sorted((payload.decode(), attempts) for payload, _, attempts in line.sink.dead) == [
            (key, 8) for key in sorted(poison)
        ]
        assert sorted(database.stored) == sorted([*keys(fine), *(["new"] if fine == 4000 else [])])
        await asyncio.sleep(2 * MAX_STEP_S)
        assert line.delivery.gate.held is None


@virtual_time
async def test_a_second_outage_that_begins_while_the_subscription_resumes_leaves_no_dead_letter() -> None:
    database, streams = Database(), keys(200)
    async with lines(database) as (line,):
        database.down = True
        line.publish_all((key, key.encode()) for key in streams)
        await asyncio.sleep(HOUR_S)
        database.down = False
        while len(database.stored) < 20:  # noqa: ASYNC110 (virtual time)
            await asyncio.sleep(0.1)
        database.down = True
        await asyncio.sleep(HOUR_S)
        assert line.delivery.gate.held is not None
        database.down = False
        await line.done()
        assert line.sink.dead == []
        assert sorted(database.stored) == sorted(streams)


@virtual_time
async def test_poison_alone_is_held_until_more_other_streams_succeed() -> None:
    poison = [f"p{number}" for number in range(6)]
    database = Database(poison)
    async with lines(database) as (line,):
        line.publish_all((key, key.encode()) for key in poison)
        await asyncio.sleep(HOUR_S)
        assert line.delivery.gate.held is not None
        assert line.sink.dead == []
        for key in keys(8):
            line.publish(key, key.encode())
            await asyncio.sleep(10 * MAX_PROBE_S)
        await line.done()
        assert sorted(payload.decode() for payload, _, _ in line.sink.dead) == sorted(poison)


@virtual_time
async def test_some_events_that_need_no_database_do_not_hide_its_outage() -> None:
    database = Database()
    database.harmless = lambda payload: payload.endswith("0")
    async with lines(database) as (line,):
        database.down = True
        for _ in range(5):
            line.publish_all((key, key.encode()) for key in keys(2000))
        await asyncio.sleep(HOUR_S)
        assert line.sink.dead == []
        database.down = False
        await line.done()
        assert line.sink.dead == []
        assert len(database.stored) == 10_000


# ---- poison that is no outage --------------------------------------------------------------------------------------


@virtual_time
async def test_poison_of_a_burst_that_is_over_is_given_up_on() -> None:
    """Its retries all fail, over many streams, and nothing else succeeds meanwhile."""
    poison = keys(10_000)[::100]
    database = Database(poison)
    async with lines(database) as (line,):
        line.publish_all((key, key.encode()) for key in keys(10_000))
        await line.done()
        assert sorted(payload.decode() for payload, _, _ in line.sink.dead) == sorted(poison)
        assert {attempts for _, _, attempts in line.sink.dead} == {8}
        assert line.delivery.gate.breaker.phase == 0


@virtual_time
async def test_one_poison_stream_holds_nothing() -> None:
    poison = [f"p{number}" for number in range(50)]
    database = Database(poison)
    async with lines(database, retry=RetryPolicy(max_attempts=2)) as (line,):
        line.publish("poison", *(text.encode() for text in poison))
        await line.done()
        assert len(line.sink.dead) == 50
        assert line.delivery.gate.breaker.phase == 0


@virtual_time
async def test_without_a_circuit_breaker_everything_is_given_up_on() -> None:
    database = Database()
    database.down = True
    async with lines(database, circuit_breaker=False) as (line,):
        line.publish_all((key, b"x") for key in keys(50))
        await line.done()
        assert len(line.sink.dead) == 50


# ---- few streams ---------------------------------------------------------------------------------------------------


@virtual_time
async def test_a_few_streams_survive_an_outage_that_the_handler_names() -> None:
    poison = ["poison"]
    database = Database(poison, error=Unavailable)
    async with lines(database) as (line,):
        database.down = True
        line.publish("a", b"1", b"2")
        line.publish("b", b"3", b"poison")
        began = now()
        await asyncio.sleep(HOUR_S)
        held = line.delivery.gate.held
        assert held is not None
        assert held.reason == "Unavailable: connection refused"
        assert database.attempts_between(began + 10, now()) <= HOUR_S / MAX_PROBE_S + 1
        assert line.sink.dead == []
        database.down = False
        await line.done()
        assert sorted(database.stored) == ["1", "2", "3"]
        assert [(payload, attempts) for payload, _, attempts in line.sink.dead] == [(b"poison", 8)]


@pytest.mark.parametrize(("error", "traceback"), [(Unavailable, False), (ConnectionError, True)])
@virtual_time
async def test_a_hold_is_logged_with_a_traceback_unless_the_handler_names_the_outage(
    error: type[Exception], traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A traceback shows where the handler failed. For a dependency that is down it says nothing, and may have data."""
    caplog.set_level(logging.WARNING, "headrace.agents")
    database = Database(error=error)
    database.down = True
    async with lines(database) as (line,):
        for key in keys(10):
            line.publish(key, b"1")
        await asyncio.sleep(30)
    held = next(record for record in caplog.records if "is held" in record.message)
    assert bool(held.exc_info) == traceback


@virtual_time
async def test_one_stream_whose_dependency_is_down_does_not_hold_up_the_others() -> None:
    database = Database(error=Unavailable)
    database.harmless = lambda payload: payload != "tenant"
    async with lines(database) as (line,):
        database.down = True
        line.publish("tenant", b"tenant")
        for number in range(600):
            line.publish_all((key, str(number).encode()) for key in keys(30))
            await asyncio.sleep(0.1)
            assert len(database.stored) == 30 * (number + 1)
        assert line.delivery.gate.breaker.phase == 0
        assert line.sink.dead == []
        database.down = False
        await line.done()
        assert database.stored[-1] == "tenant"


# ---- while it is held ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", list(OnFailure))
@virtual_time
async def test_a_subscription_that_is_held_stops_at_once_and_keeps_its_place(on_failure: OnFailure) -> None:
    database = Database()
    async with lines(database, on_failure=on_failure) as (line,):
        database.down = True
        line.publish_all((key, b"x") for key in keys(50))
        await asyncio.sleep(600)
        assert line.delivery.gate.held is not None
        began = now()
        await line.delivery.stop(10.0)
        assert now() - began <= FAILING_TAKES_S
        checkpoint = line.delivery.progress.checkpoint()
        assert len(checkpoint.behind) == 50
        assert line.sink.dead == []
        assert line.sink.gaps == []


# ---- remote consumers ----------------------------------------------------------------------------------------------


class Service:
    """Remote consumers with a database: they take all events, and reject them while the database is down."""

    def __init__(self, circle: SimulatedGroup, *, poison: Sequence[str] = (), unavailable: bool = False) -> None:
        self.down = False
        self.stored: list[str] = []
        self.given: list[float] = []
        """When each event came."""
        self._consumers: list[Consumer] = [circle.consumer("one"), circle.consumer("two")]
        self._poison = frozenset(poison)
        self._unavailable = unavailable

    def work(self) -> None:
        for consumer in self._consumers:
            for each in consumer.take():
                texts = [payload.decode() for payload in each.batch.payloads()]
                self.given += [now()] * len(texts)
                if self.down:
                    consumer.reject(each, reason="no database", delay_s=None, unavailable=self._unavailable)
                elif self._poison.intersection(texts):
                    assert consumer.reject(each, reason="poison", delay_s=None)
                else:
                    assert consumer.ack(each)
                    self.stored += texts

    async def run(self, seconds: float) -> None:
        ends = now() + seconds
        while now() < ends:
            self.work()
            await asyncio.sleep(0.1)


@pytest.mark.long
@virtual_time
async def test_remote_consumers_survive_an_outage() -> None:
    poison = keys(1000)[::50]
    async with SimulatedGroup(queues=2, retry=RetryPolicy()) as circle:
        service = Service(circle, poison=poison)
        service.down = True
        for lane in circle.lanes:
            lane.publish_all([(key, [key]) for key in keys(1000)])
        began = now()
        await service.run(HOUR_S)
        assert circle.sink.dead == []
        assert circle.gate.held is not None
        assert not circle.group.caught_up
        assert sum(at > began + 10 for at in service.given) <= HOUR_S / MAX_PROBE_S + 1
        service.down = False
        ended = now()
        await service.run(120)
        assert len(service.stored) == 2 * (1000 - len(poison))
        assert sorted(payload.decode() for payload, _, _ in circle.sink.dead) == sorted(2 * poison)
        assert circle.group.caught_up
        first = min(at for at in service.given if at >= ended)
        rate = Counter(int(at - first + 0.1 + 1e-6) for at in service.given if at >= ended)
        assert all(count <= FIRST_STEP * 2**second + 1 for second, count in rate.items())


@pytest.mark.long
@virtual_time
async def test_a_remote_consumer_of_one_stream_survives_an_outage_that_it_names() -> None:
    async with SimulatedGroup(retry=RetryPolicy()) as circle:
        service = Service(circle, unavailable=True)
        service.down = True
        circle.lane.publish_all([("a", ["1", "2", "3"]), ("a", ["4"])])
        await service.run(HOUR_S)
        assert circle.sink.dead == []
        assert circle.gate.held is not None
        service.down = False
        await service.run(120)
        assert service.stored == ["1", "2", "3", "4"]


@virtual_time
async def test_a_consumer_is_given_single_events_while_its_subscription_is_held() -> None:
    async with SimulatedGroup(retry=RetryPolicy()) as circle:
        service = Service(circle)
        service.down = True
        circle.lane.publish_all([(key, ["1", "2", "3"]) for key in keys(100)])
        await service.run(60)
        given = len(service.given)
        await asyncio.sleep(MAX_PROBE_S)
        service.work()
        assert len(service.given) == given + 1
