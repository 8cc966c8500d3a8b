"""Random steps on a queue in a real Redis beside a model that fits on a page. The clock stands still between steps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis import Redis

from benchmarks.servers import RedisServer
from headrace.adapters.redis import PushedEvent, RedisOptions, RedisQueue, TakenEvent
from tests.adapters.redis.looking import Clock, check_agreement, scripts_of_tests
from tests.random_examples import examples
from tests.servers import redis_and_valkey as redis_server

__all__ = ("redis_server",)

T = TypeVar("T")
_numbers = itertools.count()

IDS = st.sampled_from(["a", "b", "c", "d", "e", "f"])
PRIORITIES = st.sampled_from([0, 0, 1, 50, 99])
SECONDS = st.sampled_from([0.0, 0.0, 0.001, 1.0, 5.0, 60.0])


@dataclass
class Known:
    """An event of the model."""

    body: bytes
    priority: int
    due_ms: int
    attempts: int = 0
    claim: TakenEvent | None = None
    ends_ms: int = 0

    def place(self, key: str) -> tuple[int, int, str]:
        return -self.priority, self.due_ms, key


class QueueMachine(RuleBasedStateMachine):
    """Ids are few, so that steps meet one another."""

    port: int

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        options = RedisOptions(url=f"redis://127.0.0.1:{self.port}", prefix=f"machine{next(_numbers)}")
        self.opening = RedisQueue.open("q", options, scripts=scripts_of_tests())
        self.queue = self.run(self.opening.__aenter__())
        self.direct = Redis(port=self.port)
        self.clock = Clock(self.direct, [self.queue.shards[0].keys])
        self.events: dict[str, Known] = {}
        self.claims: list[TakenEvent] = []
        self.made = itertools.count()

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(step)

    @property
    def now_ms(self) -> int:
        return round(self.clock.now_s * 1000)

    def teardown(self) -> None:
        self.run(self.opening.__aexit__(None, None, None))
        self.direct.close()
        self.runner.close()

    def body(self) -> bytes:
        return b"%d" % next(self.made)

    def known(self, body: bytes, priority: int, delay_s: float) -> Known:
        return Known(body, priority, self.now_ms + round(delay_s * 1000))

    def holds(self, taken: TakenEvent) -> bool:
        known = self.events.get(taken.id)
        return known is not None and known.claim == taken

    @rule(events=st.lists(st.tuples(IDS, SECONDS, PRIORITIES), min_size=1, max_size=4))
    def push(self, events: list[tuple[str, float, int]]) -> None:
        pushed = [PushedEvent(self.body(), *event) for event in events]
        self.run(self.queue.push_many(pushed))
        for event in pushed:
            self.events[event.id] = self.known(event.body, event.priority, event.delay_s)

    @rule(key=IDS, delay_s=SECONDS, priority=PRIORITIES)
    def ensure(self, key: str, delay_s: float, priority: int) -> None:
        body = self.body()
        assert self.run(self.queue.ensure(body, id=key, delay_s=delay_s, priority=priority)) == (key not in self.events)
        self.events.setdefault(key, self.known(body, priority, delay_s))

    @rule(limit=st.integers(1, 4), timeout_s=SECONDS)
    def pop(self, limit: int, timeout_s: float) -> None:
        self.return_what_is_over()
        taken = self.run(self.queue.pop(limit, timeout_s=timeout_s))
        assert [each.id for each in taken] == self.due()[:limit]
        for each in taken:
            known = self.events[each.id]
            known.attempts += 1
            known.claim, known.ends_ms = each, self.now_ms + round(timeout_s * 1000)
            assert (each.body, each.claim.attempts, each.claim.priority) == (known.body, known.attempts, known.priority)
        self.claims += taken

    def return_what_is_over(self) -> None:
        for known in self.events.values():
            if known.claim is not None and known.ends_ms <= self.now_ms:
                known.claim = None

    def due(self) -> list[str]:
        ready = [(known.place(key), key) for key, known in self.events.items() if known.claim is None]
        return [key for place, key in sorted(ready) if place[1] <= self.now_ms]

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        if self.claims:
            chosen = data.draw(st.lists(st.sampled_from(self.claims), min_size=1, max_size=3, unique=True))
            held = [taken for taken in chosen if self.holds(taken)]
            assert self.run(self.queue.acknowledge(*chosen)) == len(held)
            for taken in held:
                del self.events[taken.id]

    @rule(data=st.data(), delay_s=SECONDS)
    def release(self, data: st.DataObject, delay_s: float) -> None:
        if self.claims:
            taken = data.draw(st.sampled_from(self.claims))
            held = self.holds(taken)
            assert self.run(self.queue.release(taken, delay_s)) == held
            if held:
                known = self.events[taken.id]
                known.claim = None
                known.due_ms = self.now_ms + round(delay_s * 1000) if delay_s else known.due_ms

    @rule(data=st.data(), timeout_s=SECONDS)
    def extend(self, data: st.DataObject, timeout_s: float) -> None:
        if self.claims:
            taken = data.draw(st.sampled_from(self.claims))
            held = self.holds(taken)
            assert self.run(self.queue.extend(taken, timeout_s)) == held
            if held:
                self.events[taken.id].ends_ms = self.now_ms + round(timeout_s * 1000)

    @rule(key=IDS, delay_s=SECONDS)
    def change_delay(self, key: str, delay_s: float) -> None:
        known = self.events.get(key)
        waits = known is not None and known.claim is None
        assert self.run(self.queue.change_delay(key, delay_s)) == waits
        if known is not None and waits:
            known.due_ms = self.now_ms + round(delay_s * 1000)

    @rule(key=IDS)
    def remove(self, key: str) -> None:
        assert self.run(self.queue.remove(key)) == (self.events.pop(key, None) is not None)

    @rule(key=IDS)
    def get(self, key: str) -> None:
        found, known = self.run(self.queue.get(key)), self.events.get(key)
        assert (found is None) == (known is None)
        if found is not None and known is not None:
            state = "waiting" if known.claim is None else "claimed"
            seen = (found.body, found.state, found.priority, found.due_ms, found.attempts)
            assert seen == (known.body, state, known.priority, known.due_ms, known.attempts)

    @rule(limit=st.integers(1, 4))
    def peek(self, limit: int) -> None:
        assert [entry.id for entry in self.run(self.queue.peek(limit))] == self.due()[:limit]

    @rule()
    def size(self) -> None:
        size = self.run(self.queue.size())
        claimed = sum(known.claim is not None for known in self.events.values())
        assert (size.ready, size.claimed, size.waiting) == (len(self.due()), claimed, len(self.events) - claimed)

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def everything_has_one_place(self) -> None:
        places = check_agreement(self.direct, self.queue.shards[0].keys)
        assert places["waiting"] | places["claimed"] == set(self.events)
        assert places["claimed"] == {key for key, known in self.events.items() if known.claim is not None}


@pytest.fixture
def machine(redis_server: RedisServer) -> type[QueueMachine]:
    QueueMachine.port = redis_server.port
    return QueueMachine


@pytest.mark.hypothesis
def test_random_steps_match_the_model(machine: type[QueueMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(60),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
