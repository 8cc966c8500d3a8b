"""Errors that the model of a consumer's holdings found, step by step. Thousands of runs may not find them again."""

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
        ("tell_progress", Q0),
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


@pytest.mark.parametrize("steps", FOUND.values(), ids=FOUND)
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
