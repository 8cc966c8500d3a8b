"""A consumer whose queues move between silos. In virtual time, with silos that do as the test says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from headrace import Consumer, ReceivedBatch, Unavailable
from headrace.client.management import ManagementClient
from headrace.client.plan import plan_of
from headrace.client.routing import DRAINING, ENDED
from headrace.proto.v1 import consumer_pb2 as pb
from tests.client.fake_silos import FakeSession, FakeSilos
from tests.simulation.virtual_time import virtual_time


class FakeManagement:
    """A client's connection to fake silos."""

    provider = "default"
    is_remote = True

    def __init__(self, silos: FakeSilos) -> None:
        self.connection = self
        self._silos = silos

    def check_loop(self) -> None: ...

    def stream(self, _: str) -> FakeSession:
        return self._silos.first()

    def at(self, address: str) -> OwnerSilo:
        return OwnerSilo(self._silos, address.partition(":")[0])


class OwnerSilo:
    """A transport to one silo."""

    def __init__(self, silos: FakeSilos, silo: str) -> None:
        self._silos = silos
        self._silo = silo

    def stream(self, _: str) -> FakeSession:
        return self._silos.to_owner(self._silo, self._silos[self._silo].address)


@asynccontextmanager
async def attached(silos: FakeSilos) -> AsyncGenerator[Consumer]:
    consumer = Consumer(cast("ManagementClient", FakeManagement(silos)), plan_of("subscribe", "s", None, {}))
    try:
        await until(lambda: consumer.holdings.assignment == frozenset(silos.queues()))
        yield consumer
    finally:
        await consumer.aclose(0)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (in virtual time)
            await asyncio.sleep(0.01)


def reports(session: FakeSession) -> list[pb.QueueReport]:
    return [report for request in session.requests for report in request.reports]


def save(session: FakeSession, report: pb.QueueReport) -> None:
    """Confirm everything up to a report."""
    saved = pb.Saved(queue=report.queue, epoch=report.epoch, number=report.number, unconfirmed=report.number)
    session.say(pb.SubscribeResponse(saved=[saved]))


async def take(consumer: Consumer) -> ReceivedBatch:
    async with asyncio.timeout(30):
        return await anext(consumer)


@virtual_time
async def test_a_planned_move_releases_waiting_batches_and_reports_the_others_to_the_old_owner():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with attached(silos) as consumer:
        old, new = silos["a"].session, silos["b"].session
        for offset in (5, 6, 7):
            old.deliver(0, offset)
        first, second = await take(consumer), await take(consumer)
        await first.ack()
        await until(lambda: reports(old))
        old.send_status(0, DRAINING)
        await until(lambda: any(report.released for report in reports(old)))
        assert [(each.offset, each.index) for report in reports(old) for each in report.released] == [(7, 0)]
        await second.ack()
        await until(lambda: len(reports(old)) == 3)
        assert [ack.offset for report in reports(old) for ack in report.acknowledgements] == [5, 6]
        save(old, reports(old)[-1])
        old.send_status(0, ENDED)
        new.send_status(0, epoch=silos.move(0, "a", "b"))
        new.deliver(0, 7)
        assert (await take(consumer)).offset == 7
        await consumer.saved()
        assert not reports(new)
        assert consumer.statistics().recognised_events == 0


@virtual_time
async def test_acknowledgements_that_are_not_confirmed_are_named_to_the_new_owner():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with attached(silos) as consumer:
        old, new = silos["a"].session, silos["b"].session
        old.deliver(0, 5)
        old.deliver(0, 6)
        acknowledged, held = await take(consumer), await take(consumer)
        await acknowledged.ack()
        await until(lambda: reports(old))
        old.send_status(0, ENDED)
        new.send_status(0, epoch=silos.move(0, "a", "b"))
        await until(lambda: reports(new))
        (report,) = reports(new)
        assert (report.epoch, [(each.key, each.offset, each.count) for each in report.unconfirmed]) == (
            2,
            [("0", 5, 1)],
        )
        new.deliver(0, 5)
        new.deliver(0, 6)
        await until(lambda: consumer.statistics().recognised_events == 2)
        await held.ack()
        await until(lambda: [ack.offset for each in reports(new) for ack in each.acknowledgements] == [5, 6])
        saved = asyncio.create_task(consumer.saved())
        save(new, reports(new)[-2])
        await asyncio.sleep(1)
        assert not saved.done()
        save(new, reports(new)[-1])
        await saved


@virtual_time
async def test_closing_waits_for_the_new_owner_of_a_queue_that_moves():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with attached(silos) as consumer:
        silos["a"].session.deliver(0, 5)
        await (await take(consumer)).ack()
        await until(lambda: reports(silos["a"].session))
        silos["a"].session.send_status(0, ENDED)
        await until(lambda: 0 not in consumer.holdings.assignment)
        closing = asyncio.create_task(consumer.aclose(60))
        await asyncio.sleep(10)
        assert not closing.done()
        new = silos["b"].session
        new.send_status(0, epoch=silos.move(0, "a", "b"))
        await until(lambda: reports(new))
        assert not new.is_closed
        save(new, reports(new)[-1])
        await closing
        assert new.is_closed


@pytest.mark.parametrize("error", [None, Unavailable("lost")], ids=["the silo ends the call", "the session is lost"])
@virtual_time
async def test_closing_attaches_again_if_acknowledgements_are_not_confirmed(error: Unavailable | None):
    silos = FakeSilos(a={0: 1})
    async with attached(silos) as consumer:
        silos["a"].session.deliver(0, 5)
        await (await take(consumer)).ack()
        await until(lambda: reports(silos["a"].session))
        closing = asyncio.create_task(consumer.aclose(60))
        silos["a"].session.end(error)
        await until(lambda: len(silos["a"].sessions) > 1 and reports(silos["a"].session))
        again = silos["a"].session
        assert again.opening.consumer == "c"
        (report,) = reports(again)
        assert [each.offset for each in report.unconfirmed] == [5]
        save(again, report)
        await closing
        assert again.is_closed
        assert len(silos["a"].sessions) == 2


@virtual_time
async def test_closing_ends_in_time_if_no_silo_confirms(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "headrace.client")
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with attached(silos) as consumer:
        silos["a"].session.deliver(0, 5)
        await (await take(consumer)).ack()
        await until(lambda: reports(silos["a"].session))
        silos["a"].session.send_status(0, ENDED)
        await until(lambda: 0 not in consumer.holdings.assignment)
        await consumer.aclose(20)
    assert "its last events may be delivered again" in caplog.text
