"""`explain` names each cause from its facts, ranks causes, and finds nothing in unknown facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.silo.why import (
    AgentState,
    ConsumerFacts,
    OwnerState,
    Position,
    StreamFacts,
    StreamQueueFacts,
    SubscriptionFacts,
    WhyFacts,
    explain,
    merged,
)
from headrace.silo.why_causes import CAUSES, Cause

CONSUMER = ConsumerFacts(id="one", connected=True, has_credit=True)
SUBSCRIPTION = SubscriptionFacts(
    name="billing", pattern="orders/*", matches=True, next_offset=5, served=True, consumers=(CONSUMER,)
)
HEALTHY = WhyFacts(
    stream="orders/1",
    stream_facts=StreamFacts(last=7, searched_from=0),
    queue=StreamQueueFacts(queue=3, silos=1, has_lease=True, owner="a", agent=AgentState.RUNNING),
    subscription=SUBSCRIPTION,
)


def facts(
    *, stream: dict[str, Any] | None = None, queue: dict[str, Any] | None = None, of: dict[str, Any] | None = None,
    **fields: Any,
) -> WhyFacts:  # fmt: skip
    return replace(
        HEALTHY,
        stream_facts=replace(HEALTHY.stream_facts, **stream or {}),
        queue=replace(HEALTHY.queue, **queue or {}),
        subscription=replace(SUBSCRIPTION, **of or {}),
    ) if not fields else replace(facts(stream=stream, queue=queue, of=of), **fields)  # fmt: skip


def codes(given: WhyFacts) -> list[str]:
    return [cause.code for cause in explain(given)]


ALONE = {
    "store_unreachable": facts(store_error="connection refused"),
    "corrupt_record": facts(queue={"damage": "queue 3: damaged at offset 5"}),
    "no_silo_for_provider": facts(queue={"silos": 0, "has_lease": None}),
    "owner_dead": facts(queue={"owner_state": OwnerState.DEAD, "lease_ends_s": 2.0}),
    "owner_unreachable": facts(queue={"owner_state": OwnerState.UNREACHABLE, "owner_heard_s": 4.0}),
    "no_lease": facts(queue={"has_lease": False}),
    "agent_stopped": facts(queue={"agent": AgentState.STOPPED}),
    "agent_faulted": facts(queue={"agent": AgentState.FAULTED, "agent_reason": "disk"}),
    "no_subscription": facts(subscription=None, patterns=("flights/*",)),
    "subscription_missing": facts(subscription=None, asked_for="biling"),
    "pattern_does_not_match": facts(of={"pattern": "flights/*", "matches": False}),
    "no_such_stream": facts(stream={"last": -1}),
    "held_by_breaker": facts(of={"held": "since 12:00: database is down"}),
    "stream_paused": facts(of={"position": Position.PAUSED, "reason": "ValueError"}),
    "stream_retrying": facts(of={"position": Position.WAITING, "attempts": 3, "max_attempts": 8, "reason": "x"}),
    "not_served": facts(of={"served": False}),
    "standing_by": facts(of={"served": False, "standby": "served by process 7"}),
    "not_asked": facts(of={"served": False}, is_asked=False),
    "consumer_disconnected": facts(
        of={
            "position": Position.RUNNING,
            "held_by": "two",
            "consumers": (CONSUMER, replace(CONSUMER, id="two", connected=False)),
        }
    ),
    "queue_not_assigned": facts(of={"assigned": False}),
    "consumer_silent": facts(of={"position": Position.RUNNING, "held_by": "one", "running_s": 9.0}),
    "handler_running": facts(of={"position": Position.RUNNING, "handler": True, "running_s": 9.0}),
    "consumer_blocked": facts(of={"consumers": (replace(CONSUMER, blocked="outbox is full"),)}),
    "out_of_credit": facts(of={"consumers": (replace(CONSUMER, has_credit=False),)}),
    "catching_up": facts(of={"position": Position.PARKED, "catch_up": True}),
    "concurrency_full": facts(of={"position": Position.READY, "handler": True, "workers_full": True}),
    "throttled": facts(queue={"pressure": True, "holders": ("slow orders/9",)}),
    "dead_lettered": facts(of={"dead_letter": "ValueError after 5 attempts", "next_offset": 8}),
    "retained_away": facts(of={"gap": "offsets 0 to 4 were removed"}),
    "nothing_pending": facts(of={"next_offset": 8}),
    "undetermined": HEALTHY,
}


@pytest.mark.parametrize("code", CAUSES)
def test_each_cause_is_named_alone_from_its_facts(code: str) -> None:
    assert codes(ALONE[code]) == [code]
    cause = explain(ALONE[code])[0]
    assert cause.evidence
    assert cause.meaning.endswith(".")
    assert cause.remedy.endswith(".")


def test_evidence_names_attempt_limit_and_reason() -> None:
    given = facts(
        of={"position": Position.WAITING, "attempts": 3, "max_attempts": 8, "next_in_s": 2.0, "reason": "timed out"}
    )
    assert explain(given)[0].evidence == "attempt 3 of 8 failed, the next in 2.0 s: timed out"


def test_causes_that_stop_more_come_first() -> None:
    given = facts(
        queue={"owner_state": OwnerState.DEAD},
        of={"position": Position.PAUSED, "reason": "x"},
        store_error="connection refused",
    )
    assert codes(given) == ["store_unreachable", "owner_dead", "stream_paused"]


@pytest.mark.parametrize("asked", [True, False])
def test_a_subscription_that_has_finished_everything_needs_nobody(asked: bool) -> None:
    assert codes(facts(of={"served": False, "next_offset": 8}, is_asked=asked)) == ["nothing_pending"]
    assert codes(facts(of={"served": False, "next_offset": 7}, is_asked=asked)) != ["nothing_pending"]


@pytest.mark.parametrize(("searched_from", "code"), [(5, "nothing_pending"), (6, "undetermined")])
def test_nothing_is_pending_if_the_search_came_to_the_position_without_an_event(searched_from: int, code: str) -> None:
    (cause,) = explain(facts(stream={"last": None, "searched_from": searched_from}, queue={"end": 9}))
    assert cause.code == code
    shown = {5: "no event from offset 5 on, everything below 5 is done", 6: "at offset 5 of queue 3, which ends at 9"}
    assert shown[searched_from] in cause.evidence


RETRYING = Cause("stream_retrying", "attempt 3 failed")
DONE, EMPTY = Cause("nothing_pending", "queue 1: done"), Cause("no_such_stream", "queue 0 has none")
STOPPED, OTHER = Cause("agent_stopped", "queue 4: stopped"), Cause("agent_stopped", "queue 5: stopped")
UNKNOWN = Cause("undetermined", "all facts were checked")
RETAINED_AWAY = Cause("retained_away", "queue 0: offsets 0 to 4: retention")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([[EMPTY]], [EMPTY]),
        ([[EMPTY], [EMPTY]], [EMPTY]),
        ([[EMPTY], [DONE], [EMPTY]], [DONE]),
        ([[STOPPED, EMPTY], [DONE], [RETRYING]], [RETRYING]),
        ([[RETRYING], [STOPPED, DONE]], [RETRYING]),
        ([[RETRYING], [STOPPED]], [STOPPED, RETRYING]),
        ([[STOPPED], [OTHER]], [Cause("agent_stopped", "queue 4: stopped; queue 5: stopped")]),
        ([[UNKNOWN], [RETRYING]], [RETRYING]),
        ([[UNKNOWN], [EMPTY]], [UNKNOWN]),
        ([[RETAINED_AWAY, EMPTY], [DONE], [EMPTY]], [RETAINED_AWAY, EMPTY]),
    ],
)
def test_queues_without_a_needed_event_do_not_count(found: list[list[Cause]], expected: list[Cause]) -> None:
    assert merged(found) == expected


@pytest.mark.parametrize("position", [4, 5])
def test_an_event_before_the_searched_part_does_not_show_that_nothing_waits(position: int) -> None:
    """The search ended in the middle: later events may be in the part that it has not seen."""
    given = facts(stream={"last": 3, "searched_from": 6}, of={"next_offset": position})
    assert codes(given) == ["undetermined"]


def test_a_finished_stream_is_not_named_beside_a_damaged_record() -> None:
    stream, damage = {"last": 3, "searched_from": 6}, {"damage": "queue 3: damaged at 8"}
    assert codes(facts(stream=stream, queue=damage, of={"next_offset": 7})) == ["corrupt_record"]


def test_evidence_of_many_queues_is_shortened() -> None:
    (cause,) = merged([[Cause("no_lease", f"queue {queue}")] for queue in range(9)])
    assert cause.evidence == "queue 0; queue 1; queue 2; and 6 more"


def test_unknown_facts_show_no_cause() -> None:
    unknown = WhyFacts(
        stream="orders/1",
        stream_facts=StreamFacts(),
        queue=StreamQueueFacts(queue=3),
        subscription=SubscriptionFacts(name="billing", pattern="orders/*", matches=True),
    )
    assert codes(unknown) == ["undetermined"]


def test_missing_subscription_is_not_claimed_while_the_store_does_not_answer() -> None:
    assert codes(facts(subscription=None, asked_for="billing", store_error="timed out")) == ["store_unreachable"]


def test_a_provider_without_subscriptions_says_so() -> None:
    without = facts(subscription=None)
    assert [(cause.code, cause.evidence) for cause in explain(without)] == [
        ("no_subscription", "there is no subscription")
    ]


def test_an_agent_that_cannot_read_does_not_stop_an_event_that_was_read() -> None:
    faulted: dict[str, Any] = {"agent": AgentState.FAULTED, "agent_reason": "disk"}
    assert codes(facts(queue=faulted, of={"position": Position.RUNNING, "handler": True})) == ["handler_running"]
    assert codes(facts(queue=faulted, of={"next_offset": 8})) == ["nothing_pending"]
    assert codes(facts(queue=faulted, of={"position": Position.PARKED}))[0] == "agent_faulted"


@pytest.mark.parametrize(
    ("of", "code"),
    [({"handler": True, "workers_full": True}, "concurrency_full"), ({"catch_up": True}, "catching_up")],
)
def test_a_subscription_that_has_not_come_to_the_event_is_named_with_its_reason(of: dict[str, Any], code: str) -> None:
    assert codes(facts(of={"position": None, **of})) == [code]


def test_removed_events_are_named_before_the_stream_that_is_empty_without_them() -> None:
    assert codes(facts(stream={"last": -1}, of={"gap": "offsets 0 to 4"})) == ["retained_away", "no_such_stream"]


def test_the_documents_have_the_table_of_all_causes() -> None:
    rows = [f"| `{code}` | {text.meaning} | {text.remedy} |" for code, text in CAUSES.items()]
    document = Path("docs/why.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in document if line.startswith("| `")] == rows
