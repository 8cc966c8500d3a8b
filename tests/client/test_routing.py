"""One consumer's sessions with the silos of a cluster. In virtual time, with silos that do as the test says."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest

from headrace import Busy, Fenced, HeadraceError, NotFound, Unavailable
from headrace.client.routing import DRAINING, ENDED, IDLE_S, OPENING_S, SERVED, Router
from headrace.proto.v1 import consumer_pb2 as pb
from tests.client.fake_silos import FakeSilos, FakeUser
from tests.simulation.virtual_time import virtual_time


class Routed:
    """A router that runs, with its silos and its user."""

    def __init__(self, silos: FakeSilos, *, stays_direct: bool = False, timeout_s: float | None = None) -> None:
        self.silos = silos
        self.user = FakeUser()
        self.states: list[str] = []
        self.told: list[tuple[str, int]] = []
        """The reasons of a lasting outage, and the seconds without a session."""
        self.router = Router(
            self.user,
            silos,
            stays_direct=stays_direct,
            timeout_s=timeout_s,
            on_open=lambda: self.states.append("open"),
            on_reconnecting=lambda _: self.states.append("reconnecting"),
            on_waiting=lambda error, seconds: self.told.append((str(error), round(seconds))),
        )
        self.task = asyncio.create_task(self.router.run())

    async def until(self, condition: Callable[[], object], limit_s: float = 10.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 (in virtual time)
                await asyncio.sleep(0.01)

    async def serving(self, *names: str, limit_s: float = 10.0) -> None:
        """Return when the router has open sessions with these silos, and no others."""
        await self.until(lambda: sorted(link.silo for link in self.router.links) == sorted(names), limit_s)

    def queues(self) -> dict[int, str]:
        """The silo that serves each queue."""
        return {queue: link.silo for link in self.router.links for queue in link.queues}


@asynccontextmanager
async def routed(silos: FakeSilos, **options: object) -> AsyncGenerator[Routed]:
    made = Routed(silos, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.router.close()
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)


@virtual_time
async def test_a_silo_that_is_alone_has_one_session():
    silos = FakeSilos(a={0: 1, 1: 1})
    silos["a"].name = ""
    silos.placement = pb.Placement  # type: ignore[method-assign]
    async with routed(silos) as made:
        made.router.grant(100, 1000)
        await made.until(lambda: len(made.queues()) == 2)
        assert len(silos["a"].sessions) == 1
        assert (silos["a"].session.credit_events, silos["a"].session.credit_bytes) == (100, 1000)


@virtual_time
async def test_each_owner_has_a_session_and_a_silo_without_queues_has_none():
    silos = FakeSilos(a={}, b={0: 1}, c={1: 1})
    async with routed(silos) as made:
        await made.serving("b", "c")
        assert silos["a"].session.is_closed
        assert all(silo.session.opening.direct for silo in silos.silos.values())
        assert made.queues() == {0: "b", 1: "c"}


@virtual_time
async def test_no_session_is_direct_if_owners_cannot_be_called():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    silos.is_clustered = False
    async with routed(silos) as made:
        await made.until(lambda: made.queues() == {0: "a", 1: "a"})
        assert not silos["a"].session.opening.direct
        assert not silos["b"].sessions


@virtual_time
async def test_a_queue_is_followed_to_its_new_owner():
    silos = FakeSilos(a={0: 1, 1: 1}, b={2: 1})
    async with routed(silos) as made:
        await made.serving("a", "b")
        silos["a"].session.send_status(1, DRAINING)
        silos["a"].session.send_status(1, ENDED)
        epoch = silos.move(1, "a", "b")
        silos.push("a", "b")
        silos["b"].session.send_status(1, epoch=epoch)
        await made.until(lambda: made.queues() == {0: "a", 1: "b", 2: "b"})
        of_queue = [(state, epoch) for queue, state, epoch in made.user.statuses if queue == 1]
        assert of_queue == [(SERVED, 1), (DRAINING, 1), (ENDED, 1), (SERVED, 2)]


@virtual_time
async def test_a_new_owner_gets_a_session_and_the_old_one_is_closed():
    silos = FakeSilos(a={0: 1}, b={1: 1}, c={})
    async with routed(silos) as made:
        await made.serving("a", "b")
        silos["b"].session.send_status(1, ENDED)
        silos.move(1, "b", "c")
        silos.push("a", "b")
        await made.serving("a", "c")
        assert silos["b"].session.is_closed
        assert made.queues() == {0: "a", 1: "c"}


@virtual_time
async def test_a_newer_owner_replaces_an_older_one_whose_batches_are_dropped():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with routed(silos) as made:
        made.router.grant(100, 10_000)
        await made.serving("a", "b")
        await made.until(lambda: len(made.queues()) == 2)
        silos["b"].session.send_status(0, epoch=2)
        await made.until(lambda: made.queues() == {0: "b", 1: "b"})
        assert [status for status in made.user.statuses if status[0] == 0] == [
            (0, SERVED, 1), (0, ENDED, 1), (0, SERVED, 2),
        ]  # fmt: skip
        silos["a"].session.deliver(0, 5)
        silos["b"].session.deliver(0, 5)
        silos["a"].session.send_status(0, ENDED)
        await made.until(lambda: made.user.offsets)
        await asyncio.sleep(1)
        assert made.user.offsets == [(0, 5)]
        assert made.queues() == {0: "b", 1: "b"}
        assert made.router.credit.events == 99


@virtual_time
async def test_an_older_owner_does_not_replace_a_newer_one():
    silos = FakeSilos(a={0: 5}, b={1: 1})
    async with routed(silos) as made:
        await made.serving("a", "b")
        silos["b"].session.send_status(0, epoch=4)
        await asyncio.sleep(1)
        assert made.queues() == {0: "a", 1: "b"}
        assert (0, SERVED, 4) not in made.user.statuses


@virtual_time
async def test_a_silo_without_queues_keeps_its_session_for_a_while():
    """It may have got a queue of which the placement does not tell yet."""
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with routed(silos) as made:
        await made.serving("a", "b")
        epoch = silos.move(1, "b", "a")
        silos["b"].session.send_status(1, ENDED)
        silos["a"].session.send_status(1, epoch=epoch)
        silos.push("a", "b")
        await asyncio.sleep(IDLE_S / 2)
        assert {link.silo for link in made.router.links} == {"a", "b"}
        await made.serving("a")


@virtual_time
async def test_the_placement_with_the_highest_epoch_is_right():
    """A silo that learns of a change last must not hide the new owner."""
    silos = FakeSilos(a={0: 1}, b={1: 1}, c={})
    async with routed(silos) as made:
        await made.serving("a", "b")
        before = silos.placement()
        silos.move(1, "b", "c")
        silos.push("a")
        await made.serving("a", "c")
        silos["a"].session.say(pb.SubscribeResponse(placement=before))
        silos["c"].session.say(pb.SubscribeResponse(placement=silos.placement()))
        silos["a"].session.say(pb.SubscribeResponse(placement=before))
        await asyncio.sleep(10)
        assert "c" in [link.silo for link in made.router.links]


@virtual_time
async def test_a_lost_session_is_opened_again_and_its_queues_end_meanwhile():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with routed(silos) as made:
        await made.serving("a", "b")
        silos["b"].session.end(Unavailable("lost"))
        await made.until(lambda: len(silos["b"].sessions) == 2)
        await made.serving("a", "b")
        await made.until(lambda: len(made.queues()) == 2)
        assert [status for status in made.user.statuses if status[0] == 1] == [
            (1, SERVED, 1), (1, ENDED, 1), (1, SERVED, 1),
        ]  # fmt: skip
        assert made.states == ["open"]


@virtual_time
async def test_without_any_session_the_owners_are_tried_by_turns():
    silos = FakeSilos(a={}, b={0: 1})
    async with routed(silos) as made:
        await made.serving("b")
        silos["a"].error = Unavailable("stopped for ever")
        silos["b"].session.end(Unavailable("lost"))
        await made.until(lambda: made.states == ["open", "reconnecting", "open"])
        assert made.queues() == {0: "b"}


@virtual_time
async def test_the_credit_of_a_lost_session_goes_to_the_others():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with routed(silos) as made:
        made.router.grant(100, 10_000)
        await made.serving("a", "b")
        silos["b"].session.say(pb.SubscribeResponse(progress=pb.Progress(waiting=True)))
        await made.until(lambda: silos["b"].session.credit_events)
        silos["b"].error = Unavailable("stopped for ever")
        silos["b"].session.end(Unavailable("lost"))
        await made.serving("a")
        silos["a"].session.say(pb.SubscribeResponse(progress=pb.Progress(waiting=True)))
        await made.until(lambda: silos["a"].session.credit_events == 100)


@virtual_time
async def test_a_starved_session_gets_the_credit_of_an_idle_one():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with routed(silos) as made:
        made.router.grant(1, 1000)
        await made.serving("a", "b")
        silos["b"].session.say(pb.SubscribeResponse(progress=pb.Progress(waiting=True)))
        await made.until(lambda: silos["b"].session.credit_events == 1)
        assert silos["a"].session.credit_events == 0
        assert made.router.credit == (1, 1000)


@virtual_time
async def test_batches_use_credit_and_all_of_it_can_be_taken_back():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with routed(silos) as made:
        made.router.grant(100, 10_000)
        await made.serving("a", "b")
        await made.until(lambda: len(made.queues()) == 2)
        size = silos["a"].session.deliver(0, 7, 10)
        await made.until(lambda: made.user.offsets)
        assert made.router.credit == (90, 10_000 - size)
        assert await made.router.take_back(1.0) == (90, 10_000 - size)
        assert made.router.credit == (0, 0)


@virtual_time
async def test_progress_is_that_of_all_sessions():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with routed(silos) as made:
        await made.serving("a", "b")
        await made.until(lambda: len(made.queues()) == 2)
        silos["a"].session.say(pb.SubscribeResponse(progress=pb.Progress(caught_up=True, in_flight_events=3)))
        await asyncio.sleep(0.1)
        assert not made.router.progress().caught_up
        silos["b"].session.say(pb.SubscribeResponse(progress=pb.Progress(caught_up=True, in_flight_events=4)))
        await made.until(lambda: made.router.progress().caught_up)
        assert made.router.progress().in_flight_events == 7
        silos["b"].session.send_status(1, ENDED)
        await made.until(lambda: len(made.queues()) == 1)
        assert not made.router.progress().caught_up


@virtual_time
async def test_confirmations_are_heard_before_the_status_of_their_queue():
    silos = FakeSilos(a={0: 1})
    async with routed(silos) as made:
        await made.until(made.queues)
        heard: list[str] = []
        made.user.handle_response = lambda link, response: heard.append("saved") if response.saved else None  # type: ignore[method-assign]
        made.user.changed = lambda link, status: heard.append("ended")  # type: ignore[method-assign]
        response = pb.SubscribeResponse(saved=[pb.Saved(queue=0, epoch=1, number=1)])
        response.queues.add(queue=0, state=pb.QueueStatus.STATE_ENDED, epoch=1)
        silos["a"].session.say(response)
        await made.until(lambda: heard)
        assert heard == ["saved", "ended"]


@virtual_time
async def test_reports_go_to_the_silo_that_is_woken():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with routed(silos) as made:
        await made.until(lambda: len(made.queues()) == 2)
        made.user.reports["b"] = [pb.SubscribeRequest(reports=[pb.QueueReport(queue=1, number=7)])]
        link = made.router.link_of(1)
        assert link is not None
        link.wake()
        await made.until(lambda: any(request.reports for request in silos["b"].session.requests))
        assert not any(request.reports for request in silos["a"].session.requests)


@virtual_time
async def test_an_owner_that_cannot_be_reached_makes_a_gateway_of_the_first_silo():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    silos["b"].is_deaf = True
    async with routed(silos) as made:
        await made.serving("a")
        first = silos["a"].session
        await made.until(lambda: made.router.uses_gateway)
        await made.until(lambda: made.queues() == {0: "a", 1: "a"})
        assert not first.is_closed  # else the silo gives the events that the user holds to other consumers
        assert not silos["a"].session.opening.direct
        # Later the owner can be reached.
        silos["b"].is_deaf = False
        gateway = silos["a"].session
        await made.serving("a", "b", limit_s=60)
        assert not gateway.is_closed
        times = [session.opening.started_us for session in (first, gateway, silos["a"].session)]
        assert times == [1000, 1001, 1002]  # so no session of before takes over
        assert not made.router.uses_gateway


@virtual_time
async def test_a_silo_that_was_killed_does_not_make_a_gateway():
    """Its queues get another owner as soon as its leases are over."""
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with routed(silos) as made:
        await made.serving("a", "b")
        silos["b"].error = Unavailable("killed")
        silos["b"].session.end(Unavailable("killed"))
        await asyncio.sleep(10)
        assert not made.router.uses_gateway
        epoch = silos.move(1, "b", "a")
        silos.push("a")
        silos["a"].session.send_status(1, epoch=epoch)
        await made.until(lambda: made.queues() == {0: "a", 1: "a"})
        await asyncio.sleep(60)
        assert not made.router.uses_gateway


@virtual_time
async def test_a_gateway_s_own_router_always_stays_direct():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    silos["b"].is_deaf = True
    async with routed(silos, stays_direct=True) as made:
        await asyncio.sleep(100)
        assert not made.router.uses_gateway
        silos["b"].is_deaf = False
        await made.serving("a", "b", limit_s=60)


@virtual_time
@pytest.mark.parametrize("error", [NotFound("deleted"), Fenced("taken over")])
async def test_a_consumer_that_is_refused_for_good_ends(error: HeadraceError):
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with routed(silos) as made:
        await made.serving("a", "b")
        silos["b"].session.end(error)
        with pytest.raises(type(error)):
            await made.task


@virtual_time
async def test_busy_is_for_good_only_at_first():
    silos = FakeSilos(a={0: 1})
    silos["a"].error = Busy("a handler serves it")
    async with routed(silos) as made:
        with pytest.raises(Busy):
            await made.task
    silos["a"].error = None
    async with routed(silos) as made:
        await made.serving("a")
        silos["a"].error = Busy("not free yet")
        silos["a"].session.end(Unavailable("restarted"))
        await made.until(lambda: made.states == ["open", "reconnecting"])
        silos["a"].error = None
        await made.serving("a")


@virtual_time
async def test_the_reason_of_a_lasting_outage_is_told_rarely():
    silos = FakeSilos(a={0: 1})
    silos["a"].error = Unavailable("no certificate is trusted")
    async with routed(silos) as made:
        await asyncio.sleep(130)
        assert [reason for reason, _ in made.told] == ["no certificate is trusted"] * 3
        assert [seconds for _, seconds in made.told] == pytest.approx([5, 65, 125], abs=3)
        silos["a"].error = None
        await made.serving("a")
        silos["a"].error = Unavailable("restarted")
        silos["a"].session.end(Unavailable("stopped"))
        await asyncio.sleep(10)
        assert made.told[3:] == [("restarted", made.told[-1][1])]


@virtual_time
async def test_an_outage_that_lasts_too_long_is_raised():
    silos = FakeSilos(a={0: 1})
    async with routed(silos, timeout_s=5.0) as made:
        await made.serving("a")
        silos["a"].error = Unavailable("stopped for ever")
        silos["a"].session.end(Unavailable("stopped"))
        began = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable):
            await made.task
        assert 3 < asyncio.get_running_loop().time() - began <= 5


@virtual_time
async def test_closing_ends_all_sessions_in_order():
    silos = FakeSilos(a={0: 1}, b={1: 1})
    async with routed(silos) as made:
        await made.serving("a", "b")
        made.user.reports["a"] = [pb.SubscribeRequest(reports=[pb.QueueReport(number=1)])]
        made.router.close()
        await made.task
        assert [bool(request.reports) for request in silos["a"].session.requests[-2:]] == [True, False]
        assert silos["a"].session.is_closed
        assert silos["b"].session.is_closed
        assert not made.queues()


@virtual_time
async def test_a_session_that_is_lost_while_closing_is_raised():
    silos = FakeSilos(a={0: 1})
    async with routed(silos) as made:
        await made.serving("a")
        silos["a"].session.end(Unavailable("lost"))
        made.router.close()
        with pytest.raises(Unavailable):
            await made.task


@virtual_time
async def test_nothing_more_is_received_while_paused():
    silos = FakeSilos(a={0: 1})
    async with routed(silos) as made:
        made.router.grant(100, 10_000)
        await made.until(made.queues)
        made.router.pause()
        for offset in range(10):
            silos["a"].session.deliver(0, offset)
        await asyncio.sleep(60)  # a consumer that does not read does not make the silo silent
        assert len(made.user.offsets) <= 1
        made.router.resume()
        await made.until(lambda: len(made.user.offsets) == 10)
        assert len(silos["a"].sessions) == 1


@virtual_time
async def test_a_silo_that_is_silent_is_given_up():
    silos = FakeSilos(a={0: 1})
    async with routed(silos) as made:
        await made.serving("a")
        silos["a"].is_silent = True
        await made.until(lambda: len(silos["a"].sessions) > 1)


@virtual_time
async def test_a_session_that_is_closed_before_it_begins_is_forgotten():
    silos = FakeSilos(a={0: 1})
    async with routed(silos) as made:
        await asyncio.sleep(0)  # the router has begun its first session, which has not begun
        made.router.close()
        async with asyncio.timeout(10):
            await made.task
        assert not silos["a"].sessions


@virtual_time
async def test_a_session_that_is_closed_while_it_opens_ends_in_order():
    """The silo has given events to its consumer already."""
    silos = FakeSilos(a={0: 1})
    silos["a"].is_deaf = True
    async with routed(silos) as made:
        await made.until(lambda: silos["a"].sessions)
        made.router.close()
        silos["a"].answer(silos["a"].session)
        await made.task
        assert silos["a"].session.is_closed
        assert made.states == []


@virtual_time
async def test_a_silo_that_does_not_answer_does_not_hold_up_closing():
    silos = FakeSilos(a={0: 1})
    silos["a"].is_deaf = True
    async with routed(silos) as made:
        await made.until(lambda: silos["a"].sessions)
        made.router.close()
        async with asyncio.timeout(2 * OPENING_S):
            await made.task
        assert made.states == []


@virtual_time
async def test_an_owner_that_refuses_connections_makes_a_gateway_of_the_first_silo():
    """Attempts begin and fail all the time, also when the sessions are changed."""
    for pause in range(20):
        silos = FakeSilos(a={0: 1}, b={1: 1})
        silos["b"].error = Unavailable("refused")
        async with routed(silos) as made:
            await asyncio.sleep(pause * 0.013)
            await made.until(lambda: made.queues() == {0: "a", 1: "a"})
            assert made.router.uses_gateway


@virtual_time
async def test_a_bug_of_the_user_ends_the_router():
    silos = FakeSilos(a={0: 1})
    async with routed(silos) as made:
        await made.serving("a")
        made.user.reports["a"] = ["no request"]  # type: ignore[list-item]
        made.router.links[0].wake()
        with pytest.raises(HeadraceError, match="no attribute 'SerializeToString'"):
            await made.task
