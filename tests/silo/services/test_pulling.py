"""Consumers that pull, with silos that do as the test says. In virtual time."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace import Fenced, LimitExceeded, StorageError, Unavailable
from headrace.agents import SendBudget
from headrace.client.routing import SERVED
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.proto.v1.subscriptions_pb2 import SubscriptionDefinition
from headrace.silo.gateway import ClusterGateways
from headrace.silo.placement import LeaseOwner
from headrace.silo.services.consumer_target import ConsumerKey
from headrace.silo.services.pulling import PullingConsumers
from headrace.streams import wire
from tests.client.fake_silos import DEFINITION, FakeSilos
from tests.simulation.virtual_time import virtual_time

TIMEOUT_S = 6.0


class Groups:
    """What a target needs of the groups of consumers."""

    def timeout(self, _: float) -> float:
        return TIMEOUT_S

    def check(self, *_: object, keeps_positions: bool) -> None: ...

    async def prepare(self, *_: object) -> None: ...


class PullCall:
    """The call of a client."""

    def __init__(self, client: str) -> None:
        self.client = self.peer = client
        self.closing = asyncio.Event()

    def check_valid(self) -> None: ...

    def remaining_s(self) -> None: ...


class Pulls:
    """Consumers that pull from one silo, `a`, which has the queues 0 and 1."""

    def __init__(self, most: int = 10) -> None:
        self.silos = FakeSilos(a={0: 1, 1: 1})
        self.silo = self.silos["a"]
        self.consumers = PullingConsumers(lambda _: self.silos, most)

    def target(self, consumer: str = "c") -> Any:
        return SimpleNamespace(
            provider=SimpleNamespace(name="p"), definition=wire.definition_of(DEFINITION), consumer=consumer,
            timeout_s=0.0, consumers=Groups(), key=ConsumerKey("p", "s", consumer),
        )  # fmt: skip

    async def pull(self, consumer: str = "c", client: str = "client", **fields: Any) -> pb.PullResponse:
        target = self.target(consumer)
        request = pb.PullRequest(subscription="s", consumer=consumer, **fields)
        answer = await self.consumers.pull(cast("Any", PullCall(client)), request, target)
        return pb.PullResponse.FromString(answer)


@virtual_time
async def test_an_answer_has_the_status_under_which_its_batches_came() -> None:
    pulls = Pulls()
    await pulls.pull()
    waiting = asyncio.create_task(pulls.pull(wait_ms=5000))
    await asyncio.sleep(1)
    pulls.silo.session.deliver(1, 7)
    answer = await waiting
    assert [(each.queue, each.offset) for each in answer.batches] == [(1, 7)]
    assert [(each.queue, each.epoch, each.generation) for each in answer.queues] == [(1, 1, 0)]
    await pulls.consumers.aclose()


@virtual_time
@pytest.mark.parametrize("fence", [{"generation": 1}, {"epoch": 2}])
async def test_a_pull_returns_nothing_from_before_a_seek_or_of_an_older_lease(fence: dict[str, int]) -> None:
    pulls = Pulls()
    await pulls.pull()
    waiting = asyncio.create_task(pulls.pull(wait_ms=5000))
    await asyncio.sleep(1)
    session = pulls.silo.session
    session.deliver(0, 4)
    session.deliver(1, 7)
    session.send_status(0, SERVED, **fence)
    answer = await waiting
    assert [(each.queue, each.offset) for each in answer.batches] == [(1, 7)]
    assert [each.queue for each in answer.queues] == [1]
    waiting = asyncio.create_task(pulls.pull(wait_ms=5000))
    await asyncio.sleep(1)
    session.deliver(0, 0)
    answer = await waiting
    assert [(each.queue, each.offset) for each in answer.batches] == [(0, 0)]
    assert [(each.epoch, each.generation) for each in answer.queues] == [
        (fence.get("epoch", 1), fence.get("generation", 0))
    ]
    await pulls.consumers.aclose()


@virtual_time
async def test_a_consumer_that_does_not_pull_any_more_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    pulls = Pulls()
    await pulls.pull()
    await asyncio.sleep(TIMEOUT_S - 1)
    await pulls.pull(wait_ms=round(2 * TIMEOUT_S * 1000))
    await asyncio.sleep(TIMEOUT_S - 1)
    assert not pulls.silo.session.is_closed
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(2)
    assert pulls.silo.session.is_closed
    assert "nothing was heard from consumer 'c'" in caplog.text


@virtual_time
async def test_a_client_has_a_bounded_number_of_consumers_that_pull() -> None:
    pulls = Pulls(most=2)
    await pulls.pull("c1")
    await pulls.pull("c2")
    with pytest.raises(LimitExceeded, match="2 consumers of client pull already"):
        await pulls.pull("c3")
    await pulls.pull("c1")
    await pulls.pull("c3", client="other")
    await pulls.pull("c2", leave=True)
    await pulls.pull("c4")
    await pulls.consumers.aclose()


class OldView:
    """The cluster, as a silo sees it that has missed a move: the former owner of each queue is the owner."""

    def __init__(self) -> None:
        self.placements = self
        self.called: list[str] = []
        self.known = LeaseOwner(1, "b")
        self.stored: LeaseOwner | None = None
        """The owner as the store has it; None: it cannot be read."""

    def owner(self, provider: str, queue: int) -> LeaseOwner:
        return self.known

    async def read_view(self) -> None:
        if self.stored is None:
            raise StorageError("the store is away")
        self.known = self.stored

    async def call(self, silo: str, method: str, request: bytes) -> bytes:
        self.called.append(silo)
        return b""


@virtual_time
async def test_results_go_to_the_owner_whose_session_sent_the_events() -> None:
    pulls, cluster = Pulls(), OldView()
    gateways = ClusterGateways(cast("Any", cluster), SendBudget(), 10.0)
    gateways.pulls = pulls.consumers
    await pulls.pull()
    pulls.silo.session.send_status(0, SERVED, epoch=2)
    await asyncio.sleep(1)
    assert await gateways.report(pulls.target(), [pb.QueueReport(queue=0, epoch=2)]) == []
    assert cluster.called == ["a"]
    await pulls.consumers.aclose()


@virtual_time
async def test_a_gateway_with_an_old_view_reads_the_owner_from_the_store() -> None:
    """A silo that leaves, or whose heartbeats fail, gets no new views. The results must not wait for one."""
    pulls, cluster = Pulls(), OldView()
    gateways = ClusterGateways(cast("Any", cluster), SendBudget(), 10.0)
    reports = [pb.QueueReport(queue=0, epoch=2)]
    with pytest.raises(StorageError):
        await gateways.report(pulls.target(), reports)
    assert cluster.called == []
    with pytest.raises(StorageError):
        await gateways.report(pulls.target(), [pb.QueueReport(queue=1, epoch=1), *reports])
    assert cluster.called == ["b"], "the owner of queue 1 is known"
    cluster.called.clear()
    cluster.stored = LeaseOwner(2, "c")
    began = asyncio.get_running_loop().time()
    assert await gateways.report(pulls.target(), reports) == []
    assert cluster.called == ["c"]
    assert asyncio.get_running_loop().time() == began


@virtual_time
async def test_nobody_gets_events_of_a_subscription_that_was_created_anew() -> None:
    """Its selector may be another one: the caller asks again, and is checked again."""
    pulls = Pulls()
    await pulls.pull()
    anew = SubscriptionDefinition(name="s", selector="b/*")
    pulls.silos.definition = wire.definition_message(wire.definition_of(anew))
    pulls.silo.session.end(Unavailable("the silo ends"))
    with pytest.raises(Fenced, match="'s' was created anew: connect again"):
        await pulls.pull(wait_ms=5000)
