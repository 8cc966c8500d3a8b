"""Errors that the model of a consumer's holdings found, and others that it finds rarely, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from .test_holdings_model import STREAMS, ConsumerAndSilos

Step = tuple[str, dict[str, Any]]
A = STREAMS[0]
Q0 = {"number": 0}
HANDED: list[Step] = [("hand_out_more", {"which": 0, "most": 2})]
OTHERS_DO: list[Step] = [
    ("another_consumer_takes", {**Q0, "which": 0}),
    ("another_consumer_ends", {**Q0, "which": 0, "done": True}),
]
EXPIRED: list[Step] = [("lose", {**Q0, "how": "expiry"}), ("connect", Q0), ("receive", Q0)]
TALK: list[Step] = [("talk", {"most": 5, "kept": 0})]

FOUND: dict[str, list[Step]] = {
    "a rejection crosses the news of a seek": [
        *[("publish", {"stream": A, "sizes": [0]})] * 2,
        ("connect", Q0),
        ("receive", Q0),
        *HANDED,
        ("receive", Q0),
        ("seek", {}),
        ("take", {}),
        ("take", {}),
        ("reject_an_event", {"which": 1, "event": 0}),
        ("send", Q0),
        *HANDED,
    ],
    "an acknowledgement crosses the news of a seek, and the rest is rejected": [
        ("publish", {"stream": A, "sizes": [0, 0]}),
        *TALK,
        ("take", {}),
        ("acknowledge_an_event", {"which": 0, "event": 0}),
        ("seek", {}),
        *HANDED,
        *TALK,
        ("take", {}),
        ("reject_a_batch", {"which": 0}),
    ],
    "another consumer is done with the rejected events": [
        ("publish", {"stream": A, "sizes": [0] * 5}),
        *TALK,
        ("take", {}),
        *EXPIRED,
        ("reject_an_event", {"which": 0, "event": 1}),
        *OTHERS_DO,
    ],
    "another consumer is done with the first of the rejected events": [
        ("publish", {"stream": A, "sizes": [0] * 5}),
        *TALK,
        ("take", {}),
        *EXPIRED,
        ("reject_a_batch", {"which": 0}),
        *OTHERS_DO,
    ],
    "a rejected part is overtaken by a later batch of its stream": [
        ("publish", {"stream": A, "sizes": [0, 0]}),
        *TALK,
        ("publish", {"stream": A, "sizes": [0]}),
        ("take", {}),
        *EXPIRED,
        ("reject_an_event", {"which": 0, "event": 1}),
        *OTHERS_DO,
        *TALK,
        ("take", {}),
        ("acknowledge_a_batch", {"which": 0}),
        *TALK,
    ],
    "the stream of a deferred rejection is gone": [
        ("publish", {"stream": A, "sizes": [0]}),
        *TALK,
        ("take", {}),
        *EXPIRED,
        ("reject_a_batch", {"which": 0}),
        *OTHERS_DO,
        ("report_progress", Q0),
        ("receive", Q0),
        ("seek", {}),
        *TALK,
        ("take", {}),
        ("lose", {**Q0, "how": "restart"}),
        *TALK,
    ],
    "a deferred rejection moves with its queue": [
        ("publish", {"stream": A, "sizes": [0, 0, 0]}),
        *TALK,
        ("take", {}),
        ("move", {**Q0, "owner": 1, "saves": False}),
        ("receive", Q0),
        ("reject_an_event", {"which": 0, "event": 1}),
        *TALK,
        ("move", {**Q0, "owner": 0, "saves": False}),
        *TALK,
    ],
    "a queue that drains gives back the batches that wait": [
        *[("publish", {"stream": A, "sizes": [0]})] * 3,
        *TALK,
        ("take", {}),
        ("drain", Q0),
        *TALK,
        ("acknowledge_a_batch", {"which": 0}),
        *TALK,
        ("move", {**Q0, "owner": 1, "saves": True}),
        *TALK,
    ],
}

ONE: list[Step] = [("publish", {"stream": A, "sizes": [0]})]
REPORTED: list[Step] = [("send", Q0), ("apply_a_request", Q0)]
LOST: list[Step] = [("lose", {**Q0, "how": "connection"}), ("connect", Q0), ("receive", Q0)]

WRITTEN: dict[str, list[Step]] = {
    "a silo takes events back, and then they are acknowledged": [
        *ONE,
        *TALK,
        ("take", {}),
        ("take_back", Q0),
        ("acknowledge_a_batch", {"which": 0}),
        *REPORTED,
        ("save", Q0),
        ("receive", Q0),
        ("receive", Q0),
    ],
    "events are acknowledged that the silo took back, of which it delivered a part again": [
        ("publish", {"stream": A, "sizes": [0, 0, 0]}),
        *TALK,
        ("take", {}),
        ("take_back", Q0),
        ("acknowledge_a_batch", {"which": 0}),
        *HANDED,
        *REPORTED,
        ("save", Q0),
        *[("receive", Q0)] * 3,
    ],
    "an acknowledgement is named again if that session is lost, too": [
        *ONE,
        *TALK,
        ("take", {}),
        ("acknowledge_a_batch", {"which": 0}),
        *REPORTED,
        *LOST,
        *REPORTED,
        *LOST,
    ],
    "an earlier owner is heard of late": [
        *ONE,
        ("connect", Q0),
        *HANDED,
        ("move", {**Q0, "owner": 1, "saves": False}),
        ("connect", {"number": 1}),
        *HANDED,
        *[("receive", {"number": 1})] * 3,
        ("take", {}),
        ("acknowledge_a_batch", {"which": 0}),
        ("send", {"number": 1}),
        ("apply_a_request", {"number": 1}),
        ("save", Q0),
        ("receive", {"number": 1}),
        ("lose", {"number": 1, "how": "connection"}),
        *[("receive", Q0)] * 2,
        ("take", {}),
    ],
    "an earlier event of the stream is held": [
        *ONE * 3,
        *TALK,
        *[("take", {})] * 3,
        *[("acknowledge_a_batch", {"which": 1})] * 2,
        *REPORTED,
    ],
    "a batch comes again without its first events and is rejected": [
        ("publish", {"stream": A, "sizes": [0] * 3}),
        *TALK,
        ("take", {}),
        *EXPIRED,
        *OTHERS_DO,
        *TALK,
        ("reject_a_batch", {"which": 0}),
        *TALK,
    ],
    "the first batch of a parcel is rejected as it comes again": [
        *ONE * 2,
        *TALK,
        *[("take", {})] * 2,
        *EXPIRED,
        ("reject_a_batch", {"which": 0}),
        *TALK,
        ("take", {}),
        *REPORTED,
        ("take", {}),
    ],
    "a batch that the user has comes again": [*ONE, *TALK, ("take", {}), *LOST, *TALK],
    "only the first report is saved": [
        *ONE * 2,
        *TALK,
        *[("take", {})] * 2,
        ("acknowledge_a_batch", {"which": 0}),
        *REPORTED,
        ("save", Q0),
        ("acknowledge_a_batch", {"which": 0}),
        *REPORTED,
        ("receive", Q0),
    ],
}


@pytest.mark.parametrize("steps", (FOUND | WRITTEN).values(), ids=FOUND | WRITTEN)
def test_nothing_is_left_behind(steps: list[Step]) -> None:
    machine = ConsumerAndSilos()
    for name, arguments in steps:
        getattr(machine, name)(**arguments)
        machine.the_account_is_right()
    machine.teardown()


def test_a_planned_move_delivers_nothing_twice() -> None:
    machine = ConsumerAndSilos()
    for name, arguments in FOUND["a queue that drains gives back the batches that wait"]:
        getattr(machine, name)(**arguments)
    machine.teardown()
    statistics = machine.holdings.statistics()
    assert (statistics.acknowledged_events, statistics.recognised_events, statistics.refused) == (3, 0, 0)


def test_a_rejection_waits_until_its_events_come_again() -> None:
    machine = ConsumerAndSilos()
    for name, arguments in [
        *ONE * 2,
        *TALK,
        *[("take", {})] * 2,
        *LOST,
        ("receive", Q0),
        ("send_again", {}),
        ("reject_a_batch", {"which": 0}),
    ]:
        getattr(machine, name)(**arguments)
    link = machine.links[0]
    assert machine.holdings.request(link) is None
    machine.receive(0)
    assert machine.holdings.take() is None
    request = machine.holdings.request(link)
    assert request is not None
    assert [(each.offset, each.index) for report in request.reports for each in report.rejections] == [(0, 0)]
    link.inbox.append(request)
    machine.teardown()
