"""Errors that the model of a consumer's account found, step by step. Thousands of runs may not find them again."""

from __future__ import annotations

from typing import Any

import pytest

from .test_session_model import STREAMS, ConsumerAndSilo

Step = tuple[str, dict[str, Any]]
A = STREAMS[0]
CONNECT: list[Step] = [("connect", {}), ("apply_a_request", {})]
ONE_EACH: list[Step] = [("publish", {"stream": A, "sizes": [0]})] * 2
HANDED: list[Step] = [("hand_out_more", {"which": 0, "most": 2})]

FOUND: dict[str, list[Step]] = {
    "a rejection crosses the news of a move": [
        *CONNECT,
        *ONE_EACH,
        *HANDED,
        ("receive", {}),
        ("receive", {}),
        ("seek", {}),
        ("take", {}),
        ("take", {}),
        ("reject_an_event", {"which": 1, "event": 0}),
        ("send", {}),
        *HANDED,
    ],
    "an acknowledgement crosses the news of a move, and the rest is rejected": [
        ("publish", {"stream": A, "sizes": [0, 0]}),
        ("talk", {"most": 1, "kept": 0}),
        ("take", {}),
        ("acknowledge_an_event", {"which": 0, "event": 0}),
        ("seek", {}),
        *HANDED,
        ("talk", {"most": 1, "kept": 0}),
        ("take", {}),
        ("reject_a_batch", {"which": 0}),
    ],
    "another consumer is done with what was rejected": [
        ("publish", {"stream": A, "sizes": [0] * 5}),
        ("talk", {"most": 3, "kept": 0}),
        ("take", {}),
        ("lose", {"how": "expiry"}),
        ("connect", {}),
        ("reject_an_event", {"which": 0, "event": 1}),
        ("another_consumer_takes", {"which": 0}),
        ("apply_a_request", {}),
        ("receive", {}),
        ("another_consumer_ends", {"which": 0, "done": True}),
    ],
    "another consumer is done with the first of what was rejected together": [
        ("publish", {"stream": A, "sizes": [0] * 5}),
        ("talk", {"most": 4, "kept": 0}),
        ("take", {}),
        ("lose", {"how": "expiry"}),
        ("connect", {}),
        ("reject_a_batch", {"which": 0}),
        ("another_consumer_takes", {"which": 0}),
        ("apply_a_request", {}),
        ("receive", {}),
        ("another_consumer_ends", {"which": 0, "done": True}),
    ],
}


@pytest.mark.parametrize("steps", FOUND.values(), ids=FOUND)
def test_nothing_is_left_behind(steps: list[Step]) -> None:
    machine = ConsumerAndSilo()
    machine.begin(strict=False)
    for name, arguments in steps:
        getattr(machine, name)(**arguments)
        machine.the_account_is_right()
    machine.teardown()
