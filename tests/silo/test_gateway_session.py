"""A consumer's session with its gateway. In virtual time, with silos that do as the test says."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace import HeadraceError, Unavailable
from headrace.agents import SendBudget
from headrace.client.routing import DRAINING, ENDED, SERVED
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.silo.gateway import OUTBOX_BYTES, GatewaySession
from headrace.streams import wire
from tests.client.fake_silos import DEFINITION, FakeSession, FakeSilos
from tests.simulation.virtual_time import virtual_time

TIMEOUT_S, DRAIN_S = 6.0, 5.0


class FakeCall:
    """The call of a consumer."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self.requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.responses: list[pb.SubscribeResponse] = []
        self.reads = asyncio.Event()
        """Cleared while the consumer does not read."""
        self.reads.set()

    async def read(self) -> bytes | None:
        return await self.requests.get()

    async def write(self, message: bytes) -> None:
        await self.reads.wait()
        self.responses.append(pb.SubscribeResponse.FromString(message))

    def check_valid(self) -> None: ...

    def say(self, **fields: Any) -> None:
        self.requests.put_nowait(pb.SubscribeRequest(**fields).SerializeToString())

    def states(self, queue: int) -> list[int]:
        """The states of a queue, in order, with 0 for each batch."""
        found: list[int] = []
        for response in self.responses:
            found += [status.state for status in response.queues if status.queue == queue]
            found += [0 for batch in response.batches if batch.queue == queue]
        return found

    @property
    def batches(self) -> int:
        return sum(len(response.batches) for response in self.responses)


class Gate:
    """A gateway session that runs."""

    def __init__(self, silos: FakeSilos) -> None:
        self.silos = silos
        self.call = FakeCall()
        self.budget = SendBudget()
        self.account = self.budget.account("client")
        opening = pb.Open(subscription="s", consumer="c", session_timeout_ms=round(TIMEOUT_S * 1000))
        target = cast("Any", SimpleNamespace(gaps=(), definition=wire.definition_of(DEFINITION)))
        session = GatewaySession(cast("Any", self.call), target, opening, silos, self.account, drain_s=DRAIN_S)
        first = pb.SubscribeRequest(credit=pb.Credit(events=1000, bytes=1 << 30))
        self.task = asyncio.create_task(session.run(first))

    async def until(self, condition: Callable[[], object], limit_s: float = 100.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 (in virtual time)
                await asyncio.sleep(0.01)

    async def has(self, *names: str) -> None:
        """Return when the gateway has sessions with these silos, and the consumer knows the status of each queue."""
        await self.until(lambda: all(self.silos[name].is_serving for name in names))
        await self.until(lambda: all(self.call.states(queue) for queue in self.silos.queues()))


@asynccontextmanager
async def gateway(**queues: dict[int, int]) -> AsyncGenerator[Gate]:
    gate = Gate(FakeSilos(**queues))
    try:
        yield gate
    finally:
        gate.task.cancel()
        await asyncio.gather(gate.task, return_exceptions=True)


@virtual_time
async def test_opened_comes_first_and_statuses_before_batches():
    async with gateway(a={0: 1}, b={1: 1}) as gate:
        await gate.has("a", "b")
        gate.silos["b"].session.deliver(1, 3)
        await gate.until(lambda: gate.call.batches)
        assert gate.call.responses[0].opened.consumer == "c"
        assert not any(response.HasField("placement") for response in gate.call.responses)
        assert gate.call.states(1) == [SERVED, 0]


@virtual_time
async def test_reports_go_to_the_owner_and_confirmations_come_back():
    async with gateway(a={0: 1}, b={1: 1}) as gate:
        await gate.has("a", "b")
        report = pb.QueueReport(queue=1, epoch=1, number=7, acknowledgements=[pb.Acknowledgement(offset=3)])
        gate.call.say(reports=[report])
        session = gate.silos["b"].session
        await gate.until(lambda: any(report in request.reports for request in session.requests))
        session.say(pb.SubscribeResponse(saved=[pb.Saved(queue=1, epoch=1, number=7)]))
        await gate.until(lambda: any(response.saved for response in gate.call.responses))
        assert not any(request.reports for request in gate.silos["a"].session.requests)


@virtual_time
async def test_reports_about_a_queue_that_no_silo_serves_are_refused():
    async with gateway(a={0: 1}) as gate:
        await gate.has("a")
        gate.call.say(reports=[pb.QueueReport(queue=5, acknowledgements=[pb.Acknowledgement(offset=3, index=2)])])
        refused = pb.Refusal(queue=5, offset=3, index=2)
        await gate.until(lambda: any(refused in response.refused for response in gate.call.responses))


@virtual_time
async def test_little_is_received_while_the_consumer_does_not_read():
    async with gateway(a={0: 1}) as gate:
        await gate.has("a")
        gate.call.reads.clear()
        session, sent = gate.silos["a"].session, 0
        for offset in range(100):
            sent += session.deliver(0, offset, 1000)
        size = sent // 100
        await asyncio.sleep(1)
        assert 0 < gate.account.held <= OUTBOX_BYTES + size
        assert gate.budget.held == gate.account.held
        gate.call.reads.set()
        await gate.until(lambda: gate.call.batches == 100)
        assert gate.account.held == 0


@virtual_time
async def test_bytes_of_other_consumers_count_too():
    async with gateway(a={0: 1}) as gate:
        await gate.has("a")
        gate.call.reads.clear()
        gate.budget.account("other").add(gate.budget.limit)
        for offset in range(10):
            gate.silos["a"].session.deliver(0, offset, 100)
        await asyncio.sleep(1)
        waiting = gate.account.held
        gate.call.reads.set()
        await gate.until(lambda: gate.call.batches == 10)
        sizes = [batch.ByteSize() for response in gate.call.responses for batch in response.batches]
        assert waiting < 3 * max(sizes)


@virtual_time
async def test_a_silent_consumer_is_given_up_and_its_sessions_are_closed_in_order():
    async with gateway(a={0: 1}, b={1: 1}) as gate:
        await gate.has("a", "b")
        with pytest.raises(Unavailable, match="silent"):
            await gate.task
        assert gate.silos["a"].session.is_closed
        assert gate.silos["b"].session.is_closed


@virtual_time
async def test_a_consumer_whose_connection_is_lost_is_waited_for():
    async with gateway(a={0: 1}) as gate:
        await gate.has("a")
        gate.call.requests.put_nowait(None)
        await gate.task
        assert not gate.silos["a"].session.is_closed


@virtual_time
async def test_a_close_is_answered_when_all_silos_have_saved():
    async with gateway(a={0: 1}, b={1: 1}) as gate:
        await gate.has("a", "b")
        gate.call.say(close=True)
        await gate.task
        assert gate.silos["a"].session.is_closed
        assert gate.silos["b"].session.is_closed
        assert gate.call.states(0)[-1] == gate.call.states(1)[-1] == ENDED


@virtual_time
async def test_a_refusal_of_a_silo_ends_the_call():
    async with gateway(a={0: 1}, b={1: 1}) as gate:
        await gate.has("a", "b")
        gate.silos["b"].session.end(HeadraceError("deleted"))
        with pytest.raises(HeadraceError, match="deleted"):
            await gate.task


@virtual_time
async def test_a_gateway_that_stops_delivers_events_in_flight_before_the_queues_drain():
    async with gateway(a={0: 1}, b={1: 1}) as gate:
        await gate.has("a", "b")
        gate.silos["b"].session.deliver(1, 3)
        gate.silos["b"].session.deliver(1, 4)
        gate.call.closing.set()
        with pytest.raises(Unavailable, match="the silo stops"):
            await gate.task
        assert gate.call.states(1) == [SERVED, 0, 0, DRAINING, ENDED]
        assert any(response.HasField("closing") for response in gate.call.responses)
        assert gate.silos["b"].session.is_closed


def answer_with_progress(session: FakeSession, progress: pb.Progress) -> None:
    """Say this whenever the gateway takes credit back."""
    send = session.send

    async def answered(message: bytes) -> None:
        await send(message)
        if pb.SubscribeRequest.FromString(message).reclaim:
            session.say(pb.SubscribeResponse(progress=progress))

    session.send = answered


@virtual_time
async def test_a_gateway_stops_at_once_although_owners_have_more_events():
    async with gateway(a={0: 1}, b={1: 1}) as gate:
        await gate.has("a", "b")
        answer_with_progress(gate.silos["b"].session, pb.Progress(needed_bytes=1))
        gate.call.closing.set()
        before = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable, match="the silo stops"):
            await gate.task
        assert gate.silos["b"].session.is_closed
        assert asyncio.get_running_loop().time() - before < 1  # virtual


@virtual_time
async def test_a_gateway_that_stops_does_not_wait_for_ever_for_events_in_flight(caplog: pytest.LogCaptureFixture):
    async with gateway(a={0: 1}) as gate:
        await gate.has("a")
        session = gate.silos["a"].session
        session.deliver(0, 3)
        answer_with_progress(session, pb.Progress(in_flight_events=1))
        await gate.until(lambda: gate.call.batches)
        gate.call.closing.set()
        beats = asyncio.create_task(beating(gate.call))
        with pytest.raises(Unavailable, match="the silo stops"):
            await gate.task
        beats.cancel()
        assert not session.is_closed  # the events wait for the consumer
    assert "consumer 'c' has 1 events in flight after 5 s" in caplog.text


async def beating(call: FakeCall) -> None:
    """A consumer that is there, and reports nothing."""
    while True:
        call.requests.put_nowait(b"")
        await asyncio.sleep(1)
