"""A session takes over the consumer of another one, whose last message goes out at that very moment."""

import asyncio
from pathlib import Path

from headrace import Fenced, Provider, StreamId
from headrace.agents import Group
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.silo.consumer_groups import ConsumerGroups
from headrace.silo.in_process import InProcessCall
from headrace.silo.services.consumer import ConsumerService
from headrace.silo.services.visible import VisibleBounds
from headrace.streams.frames import split
from tests.silo.services.sessions import defined, eventually

STREAMS, SIZE = 20, 50_000
"""More in flight than goes into one message."""


class Session:
    """One call, without a network: a message of the silo waits until the test takes it."""

    def __init__(self, service: ConsumerService) -> None:
        self.call = InProcessCall(asyncio.Event(), None)
        self.streams: set[StreamId] = set()
        opening = pb.Open(subscription="s", definition=defined("s"), consumer="c")
        credit = pb.Credit(events=1000, bytes=100 << 20)
        self.call.request(pb.SubscribeRequest(open=opening, credit=credit).SerializeToString())
        self.task = asyncio.create_task(service.subscribe(self.call))

    def take(self) -> bool:
        """Whether there was something."""
        if (message := self.call.response()) is None:
            return False
        self.streams.update(each.batch.stream for each in split(message)[0])
        return True


async def test_events_in_flight_go_to_the_session_that_took_over(tmp_path: Path) -> None:
    async with (
        Provider.open(tmp_path / "data", queues=1) as provider,
        ConsumerGroups.opened(provider, 10.0) as consumers,
    ):
        service = ConsumerService({"default": provider}, {"default": consumers}, VisibleBounds())
        for number in range(STREAMS):
            await provider.publish(StreamId("n", str(number)), bytes(SIZE))
        first = Session(service)

        async def handed_out() -> bool:
            """Taking only until then leaves the last messages: the session waits in sending them."""
            members = consumers.members(provider.manager.served["s"].definition) if provider.manager.served else ()
            if members and members[0].in_flight_events == STREAMS:
                return True
            first.take()
            return False

        await eventually(handed_out)
        second = Session(service)
        group = provider.manager.served["s"].service
        assert isinstance(group, Group)
        (member,) = group.members.values()
        while member.connections < 2:  # noqa: ASYNC110 (the very moment matters)
            await asyncio.sleep(0)
        while first.take():
            pass
        while len(second.streams) < STREAMS:
            assert second.take() or not second.task.done()
            await asyncio.sleep(0.001)
        assert isinstance((await asyncio.gather(first.task, return_exceptions=True))[0], Fenced)
        second.task.cancel()
        await asyncio.gather(second.task, return_exceptions=True)
