"""How the reports of a request are applied, if the queue or the consumer changes meanwhile."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.agents import EventRange
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.silo.consumer_groups import AttachedConsumer
from headrace.silo.services import reports
from headrace.streams.errors import InvalidArgument

MANY = 3 * reports.CHUNK


class Group:
    """Takes everything at epoch 1 and generation 0. `on_turn` is called before the last event of a chunk."""

    def __init__(self) -> None:
        self.epoch = 1
        self.taken: list[int] = []
        self.applied: list[int] = []
        self.on_turn = lambda: None

    def is_current(self, queue: int, epoch: int, generation: int) -> bool:
        return (queue, epoch, generation) == (0, self.epoch, 0)

    def acknowledge(self, _: object, events: EventRange, *, up_to: bool) -> bool:
        self.taken.append(events.offset)
        if len(self.taken) == reports.CHUNK:
            self.on_turn()
        return True

    def holds_part(self, *_: object) -> bool:
        return False

    def note_applied(self, _: object, queue: int, number: int) -> None:
        self.applied.append(number)


def attached(group: Group) -> tuple[AttachedConsumer, Any]:
    member = SimpleNamespace(connections=1)
    return AttachedConsumer(cast(Any, group), cast(Any, member)), member


def report(count: int = MANY, **fields: Any) -> pb.QueueReport:
    fields = {"epoch": 1, "number": 7} | fields
    return pb.QueueReport(acknowledgements=[pb.Acknowledgement(offset=offset) for offset in range(count)], **fields)


async def test_a_report_is_applied_in_order_and_its_number_last() -> None:
    group = Group()
    place, _ = attached(group)
    assert await reports.apply(place, [report(), report(0, number=8)]) == []
    assert group.taken == list(range(MANY))
    assert group.applied == [7, 8]


async def test_the_rest_of_a_report_is_refused_if_the_queue_ends_meanwhile() -> None:
    group = Group()
    place, _ = attached(group)
    group.on_turn = lambda: setattr(group, "epoch", 2)
    refused = await reports.apply(place, [report(), report(1, epoch=2, number=8)])
    assert [each.offset for each in refused] == list(range(reports.CHUNK, MANY))
    assert group.taken == [*range(reports.CHUNK), 0]
    assert group.applied == [8]


async def test_the_rest_of_a_report_is_refused_if_another_connection_takes_over() -> None:
    group = Group()
    place, member = attached(group)
    group.on_turn = lambda: setattr(member, "connections", 2)
    refused = await reports.apply(place, [report()])
    assert [each.offset for each in refused] == list(range(reports.CHUNK, MANY))
    assert group.applied == []


async def test_reports_without_entries_count_too() -> None:
    place, _ = attached(Group())
    with pytest.raises(InvalidArgument, match="100,000 reports"):
        await reports.apply(place, [report(0)] * (reports.MAX_ENTRIES + 1))
