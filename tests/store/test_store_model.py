"""The control store against a model: two stores in one place, and a dictionary with the expected content."""

import asyncio
import itertools
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from benchmarks.servers import PostgresServer
from headrace import (
    DeadLetter,
    DefinitionConflict,
    Fenced,
    NotFound,
    Selector,
    SequenceToken,
    StreamId,
    SubscriptionDefinition,
)
from headrace.store.control_store import ControlStore
from headrace.streams.subscriptions import Checkpoint, StreamBehind
from tests.random_examples import examples
from tests.servers import new_schema

T = TypeVar("T")

STEPS = settings(max_examples=examples(10), stateful_step_count=25, deadline=None)
STEPS_ON_A_SERVER = settings(STEPS, max_examples=examples(10, quick=2))
"""Fewer, because each example makes two schemas. The test on a file draws the usual number."""

pytestmark = pytest.mark.timeout(400)

NAMES = st.sampled_from(["a", "b", "c"])
WHO = st.integers(0, 1)
OFFSETS = st.integers(0, 20)
BEHIND = st.dictionaries(
    st.sampled_from([StreamId("n", "x"), StreamId("n/x", ""), StreamId("", "ä\0")]),
    st.builds(
        StreamBehind, st.builds(SequenceToken, OFFSETS, st.integers(0, 3)), st.sampled_from(["", "paused: boom"])
    ),
    max_size=2,
)
POSITIONS = st.dictionaries(st.integers(0, 2), st.builds(Checkpoint, OFFSETS, BEHIND), max_size=3)
DEFINITIONS = st.builds(
    SubscriptionDefinition, name=NAMES, selector=st.builds(Selector, st.sampled_from(["n/x", "n/*"]))
)


class Known:
    """A subscription, as the model knows it."""

    def __init__(self, definition: SubscriptionDefinition, start: dict[int, Checkpoint]) -> None:
        self.definition = definition
        self.epoch = 0
        self.positions = dict(start)
        self.written = dict.fromkeys(start, 0)
        """The epoch under which each position was written."""

    def save(self, positions: dict[int, Checkpoint]) -> None:
        for queue, position in positions.items():
            late = self.written.get(queue) == self.epoch and position.next_offset < self.positions[queue].next_offset
            if not late:
                self.positions[queue] = position
                self.written[queue] = self.epoch


class TwoStores(RuleBasedStateMachine):
    """After any steps of two processes on one store, each sees the content of the dictionary."""

    grants = Bundle[tuple[str, int]]("grants")

    def __init__(self, where: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.where = where
        self.stores = [self.run(ControlStore.open(where)) for _ in range(2)]
        self.known: dict[str, Known] = {}
        self.highest = 0
        self.letters: dict[tuple[str, int, bytes], str] = {}

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def teardown(self) -> None:
        for store in self.stores:
            self.run(store.aclose())
        self.runner.close()

    @rule(who=WHO, definition=DEFINITIONS, start=POSITIONS)
    def create(self, who: int, definition: SubscriptionDefinition, start: dict[int, Checkpoint]) -> None:
        create = self.stores[who].create_subscription("p", definition, start)
        known = self.known.get(definition.name)
        if known is None:
            assert self.run(create) is True
            self.known[definition.name] = Known(definition, start)
        elif known.definition == definition:
            assert self.run(create) is False
        else:
            with pytest.raises(DefinitionConflict):
                self.run(create)

    @rule(who=WHO, name=NAMES)
    def delete(self, who: int, name: str) -> None:
        if self.known.pop(name, None):
            self.run(self.stores[who].delete_subscription("p", name))
        else:
            with pytest.raises(NotFound):
                self.run(self.stores[who].delete_subscription("p", name))

    @precondition(lambda self: self.known)
    @rule(target=grants, who=WHO, data=st.data())
    def attach(self, who: int, data: st.DataObject) -> tuple[str, int]:
        name = data.draw(st.sampled_from(sorted(self.known)))
        attachment = self.run(self.stores[who].attach("p", name))
        assert attachment.checkpoints == self.known[name].positions
        return self.granted(name, attachment.epoch)

    @precondition(lambda self: self.known)
    @rule(target=grants, who=WHO, data=st.data(), positions=POSITIONS)
    def seek(self, who: int, data: st.DataObject, positions: dict[int, Checkpoint]) -> tuple[str, int]:
        name = data.draw(st.sampled_from(sorted(self.known)))
        grant = self.granted(name, self.run(self.stores[who].seek("p", name, positions, "test")))
        self.known[name].save(positions)
        return grant

    def granted(self, name: str, epoch: int) -> tuple[str, int]:
        assert epoch > self.highest
        self.highest = self.known[name].epoch = epoch
        return name, epoch

    @rule(who=WHO, progress=st.lists(st.tuples(grants, POSITIONS), max_size=3, unique_by=lambda item: item[0][0]))
    def save(self, who: int, progress: list[tuple[tuple[str, int], dict[int, Checkpoint]]]) -> None:
        rows = [(name, epoch, positions) for (name, epoch), positions in progress]
        stale = [name for name, epoch, _ in rows if not self.is_current(name, epoch)]
        assert self.run(self.stores[who].save_checkpoints("p", rows)).subscriptions == stale
        for name, epoch, positions in rows:
            if self.is_current(name, epoch):
                self.known[name].save(positions)

    @rule(
        who=WHO,
        grant=grants,
        offset=OFFSETS,
        payload=st.sampled_from([b"", b"x"]),
        reason=st.sampled_from(["boom", "worse"]),
    )
    def give_up(self, who: int, grant: tuple[str, int], offset: int, payload: bytes, reason: str) -> None:
        name, epoch = grant
        stream, token = StreamId("n", "x"), SequenceToken(offset)
        letter = DeadLetter(0, "p", name, 0, stream, token, payload, {}, None, 1, reason, 8, 2)
        if self.is_current(name, epoch):
            self.run(self.stores[who].add_dead_letters([letter], epoch))
            self.letters[name, offset, payload] = reason
        else:
            with pytest.raises(Fenced):
                self.run(self.stores[who].add_dead_letters([letter], epoch))

    def is_current(self, name: str, epoch: int) -> bool:
        return name in self.known and self.known[name].epoch == epoch

    @rule(who=WHO)
    def reopen(self, who: int) -> None:
        self.run(self.stores[who].aclose())
        self.stores[who] = self.run(ControlStore.open(self.where))

    @invariant()
    def both_stores_say_what_the_model_says(self) -> None:
        for store in self.stores:
            self.run(self.compare(store))

    async def compare(self, store: ControlStore) -> None:
        definitions = [known.definition for _, known in sorted(self.known.items())]
        assert await store.subscriptions("p") == definitions
        for name, known in self.known.items():
            assert await store.checkpoints("p", name) == known.positions
        for queue in range(3):
            stands = {name: known.positions[queue] for name, known in self.known.items() if queue in known.positions}
            assert await store.checkpoints_of_queue("p", queue) == stands
        watermarks: dict[int, int] = {}
        for known in self.known.values():
            for queue, position in known.positions.items():
                watermarks[queue] = min(position.watermark, watermarks.get(queue, position.watermark))
        assert await store.watermarks("p") == watermarks
        letters = await store.dead_letters("p")
        found = {(each.subscription, each.token.offset, each.payload): each.reason for each in letters}
        assert found == self.letters
        assert len(letters) == len(self.letters)


@pytest.mark.hypothesis
def test_two_stores_on_a_file_agree_with_the_model(tmp_path: Path):
    numbers = itertools.count()

    class OnAFile(TwoStores):
        def __init__(self) -> None:
            super().__init__(str(tmp_path / f"{next(numbers)}.db"))

    run_state_machine_as_test(OnAFile, settings=STEPS)


@pytest.mark.long
@pytest.mark.hypothesis
def test_two_stores_on_a_server_agree_with_the_model(postgres_server: PostgresServer):
    class OnAServer(TwoStores):
        def __init__(self) -> None:
            super().__init__(new_schema(postgres_server))

    run_state_machine_as_test(OnAServer, settings=STEPS_ON_A_SERVER)
