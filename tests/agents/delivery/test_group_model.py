"""A group against a model that knows only which events are done and which consumer holds which event. Hypothesis looks
for a history of publishing, acknowledging, rejecting, releasing, coming and going, saves, stops and crashes that the
two tell differently. An event that is confirmed as saved must not come again."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace import RetryPolicy, SequenceToken
from headrace.agents import EventRange
from headrace.agents.cursor import CursorState
from headrace.agents.delivery.confirmations import Confirmed
from headrace.streams.frames import DeliveredBatch
from headrace.streams.subscriptions import Checkpoint, Mode
from tests.random_examples import examples
from tests.simulation.deliveries import stream
from tests.simulation.groups import PLENTY, Consumer, SimulatedGroup, indexes, payloads
from tests.simulation.virtual_time import SimulatedLoop

KEYS, NAMES = ("a", "b", "c"), ("0", "1", "2")
STUBBORN = RetryPolicy(max_attempts=1_000_000, max_elapsed_s=1e9, initial_delay_s=0.0)
keys, names = st.sampled_from(KEYS), st.sampled_from(NAMES)
grants = st.sampled_from(((0, 0), (1, PLENTY), (3, PLENTY), (PLENTY, 60), (PLENTY, 300), (PLENTY, PLENTY)))
some = st.integers(0, 7)


class Report(NamedTuple):
    """What a consumer reported under a number: events that are done, and events that it named as unconfirmed."""

    done: set[tuple[str, int]]
    unconfirmed: set[tuple[str, int]]


class GroupMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = SimulatedLoop()
        self.clients: dict[str, Consumer] = {}
        self.batches: dict[str, dict[int, list[int]]] = {key: {} for key in KEYS}
        """By offset: the numbers of its events."""
        self.done: dict[str, set[int]] = {key: set() for key in KEYS}
        self.held: dict[str, dict[int, str]] = {key: {} for key in KEYS}
        self.saved: Checkpoint = Checkpoint(0)
        self.reports: dict[str, list[Report]] = {name: [] for name in NAMES}
        """The reports since the consumer connected and the queue began, numbered from 1."""
        self.confirmed: set[tuple[str, int]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)

    @initialize(
        mode=st.sampled_from((Mode.SHARED, Mode.BOUND)),
        rewindable=st.booleans(),
        credit=grants,
        counts=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    )
    def begin(self, mode: Mode, rewindable: bool, credit: tuple[int, int], counts: list[int]) -> None:
        self.mode, self.rewindable = mode, rewindable
        self.run(self._begin(credit, counts))

    async def _begin(self, credit: tuple[int, int], counts: list[int]) -> None:
        self.circle = SimulatedGroup(mode=self.mode, rewindable=self.rewindable, retry=STUBBORN)
        await self._publish("a", counts)
        await self._connect("0", (PLENTY, PLENTY))
        await self._connect("1", credit)

    # ---- what happens ----------------------------------------------------------------------------------------------

    @rule(key=keys, counts=st.lists(st.integers(1, 8), min_size=1, max_size=4))
    def publish(self, key: str, counts: list[int]) -> None:
        self.run(self._publish(key, counts))

    async def _publish(self, key: str, counts: list[int]) -> None:
        known, lane = self.batches[key], self.circle.lane
        first, parts = sum(map(len, known.values())), list[tuple[str, list[str]]]()
        for offset, count in enumerate(counts, lane.cache.next_offset):
            known[offset] = list(range(first, first + count))
            parts.append((key, [str(number) for number in known[offset]]))
            first += count
        lane.publish_all(parts)
        await self._settle()

    @rule(name=names, credit=grants)
    def connect(self, name: str, credit: tuple[int, int]) -> None:
        self.run(self._connect(name, credit))

    async def _connect(self, name: str, credit: tuple[int, int]) -> None:
        client = self.clients.setdefault(name, Consumer(self.circle.group, name))
        client.connect(*credit)
        self.reports[name] = []
        self._look()
        await self._settle()

    @rule(name=names, credit=grants)
    def grant(self, name: str, credit: tuple[int, int]) -> None:
        if self._here(name):
            self.run(self._grant(name, credit))

    async def _grant(self, name: str, credit: tuple[int, int]) -> None:
        self.clients[name].grant(*credit)
        self._look()
        await self._settle()

    @rule(name=names, leaves=st.booleans())
    def go(self, name: str, leaves: bool) -> None:
        if self._here(name):
            self.run(self._away(name, leaves=leaves))

    async def _away(self, name: str, *, leaves: bool) -> None:
        client = self.clients[name]
        if leaves:
            client.leave()
            self._drop(name)
        else:
            client.disconnect()
        await self._settle()

    @rule(silent=st.sets(names))
    def time_passes(self, silent: set[str]) -> None:
        """Wait so long that consumers that stay silent are gone."""
        self.run(self._time_passes(silent))

    async def _time_passes(self, silent: set[str]) -> None:
        for _ in range(3):
            await asyncio.sleep(12.0)
            # Now, not at the end: events since the last tick can be taken back in this one (their consumer is silent,
            # or their queue moves), and then come to another consumer.
            self._hear()
            for name in NAMES:
                if self._here(name) and name not in silent:
                    self.circle.group.heard(self.clients[name].member)
            self.circle.group.tick()
            self._look()
        await self._settle()

    @precondition(lambda self: any(self.held.values()))
    @rule(pick=some, index=some, count=some, up_to=st.booleans())
    def acknowledge(self, pick: int, index: int, count: int, up_to: bool) -> None:
        name, key, offset = self._pick(pick)
        self.run(self._acknowledge(name, key, offset, index, count, up_to))

    @precondition(lambda self: any(self.held.values()))
    @rule(pick=some)
    def acknowledge_all_of_a_batch(self, pick: int) -> None:
        name, key, offset = self._pick(pick)
        self.run(self._acknowledge(name, key, offset, 0, 0, up_to=False))

    @rule(name=names, key=keys, offset=some, index=some, count=some, up_to=st.booleans())
    def acknowledge_anything(self, name: str, key: str, offset: int, index: int, count: int, up_to: bool) -> None:
        if self._here(name) and offset in self.batches[key]:
            self.run(self._acknowledge(name, key, offset, index, count, up_to))

    async def _acknowledge(self, name: str, key: str, offset: int, index: int, count: int, up_to: bool) -> None:
        batch, held = self.batches[key][offset], self.held[key]
        named = batch[index:][: count or None]
        mine = [n for n in named if held.get(n) == name]
        client = self.clients[name]
        if not self._here(name):
            return  # it holds something, and is waited for
        answer = client.group.acknowledge(client.member, EventRange(0, offset, index, count), up_to=up_to)
        if up_to and answer:  # also where the named ones were done already
            mine = [n for n, by in held.items() if by == name and n <= named[-1]]
        if not up_to or (named and held.get(named[0]) == name):
            assert answer or not mine
        if answer:
            self.done[key].update(mine)
            for number in mine:
                del held[number]
            self._report(name, Report({(key, number) for number in mine}, set()))
        await self._settle()

    @rule(name=names, key=keys, offset=some, index=some, count=st.integers(1, 8))
    def name_unconfirmed(self, name: str, key: str, offset: int, index: int, count: int) -> None:
        if self._here(name) and index < len(self.batches[key].get(offset, ())):
            self.run(self._name_unconfirmed(name, key, offset, index, count))

    async def _name_unconfirmed(self, name: str, key: str, offset: int, index: int, count: int) -> None:
        """Only those that the consumer holds are done by this."""
        named = self.batches[key][offset][index:][:count]
        number = len(self.reports[name]) + 1
        self.clients[name].unconfirmed(number, (key, offset, index, len(named)))
        for each in [n for n in named if self.held[key].get(n) == name]:
            self.done[key].add(each)
            del self.held[key][each]
        self._report(name, Report(set(), {(key, n) for n in named}))
        await self._settle()

    def _report(self, name: str, report: Report) -> None:
        self.reports[name].append(report)
        self.clients[name].report(len(self.reports[name]))

    @precondition(lambda self: any(self.held.values()))
    @rule(pick=some, index=some)
    def release(self, pick: int, index: int) -> None:
        name, key, offset = self._pick(pick)
        self.run(self._release(name, key, offset, index))

    async def _release(self, name: str, key: str, offset: int, index: int) -> None:
        client, batch, held = self.clients[name], self.batches[key][offset], self.held[key]
        if not self._here(name):
            return
        if client.group.release(client.member, EventRange(0, offset, index)):
            for number in [n for n in held if n >= batch[index]]:
                del held[number]
        else:
            assert index >= len(batch) or held.get(batch[index]) != name
        await self._settle()

    @precondition(lambda self: any(self.held.values()))
    @rule(pick=some, index=some, count=some)
    def reject(self, pick: int, index: int, count: int) -> None:
        name, key, offset = self._pick(pick)
        self.run(self._reject(name, key, offset, index, count))

    async def _reject(self, name: str, key: str, offset: int, index: int, count: int) -> None:
        client, batch, held = self.clients[name], self.batches[key][offset], self.held[key]
        expected = index < len(batch) and held.get(batch[index]) == name
        if not self._here(name):
            return
        assert client.group.reject(client.member, EventRange(0, offset, index, count), "no", 0) == expected
        if expected:
            for number in [n for n in held if n >= batch[index]]:
                del held[number]
        await self._settle()

    @precondition(lambda self: self.rewindable)
    @rule(key=keys)
    def leave_the_cache(self, key: str) -> None:
        self.run(self._leave_the_cache(key))

    async def _leave_the_cache(self, key: str) -> None:
        cursor = self.circle.delivery.progress.cursors.get(stream(key))
        if cursor is not None:
            self.circle.delivery.detach(cursor)
        await self._settle()

    @rule(how=st.sampled_from(("save", "save", "fail", "stop", "crash")))
    def save_or_start_again(self, how: str) -> None:
        if how == "stop":
            self.run(self._stop_and_start())
        elif how == "crash":
            self.run(self._crash())
        else:
            self.run(self._save(fails=how == "fail"))

    async def _save(self, *, fails: bool) -> None:
        unsaved, marks = self.circle.delivery.unsaved(), self.circle.delivery.marks()
        if not fails:
            if unsaved is not None:
                self.saved = unsaved.checkpoint
                unsaved.note_saved()
            self._matches(self.saved)
            for mark in marks:
                mark.confirm({})
        await self._settle()
        for name, reports in self.reports.items():
            if reports and self._here(name):
                self._check_confirmed(self.clients[name], reports, saved=not fails)

    def _check_confirmed(self, client: Consumer, reports: list[Report], *, saved: bool) -> None:
        stored = {(key, number) for key in KEYS for number in self._done_in(self.saved, key)}
        open_at = [at for at, report in enumerate(reports) if not report.unconfirmed <= stored]
        expected = Confirmed(1, len(reports), open_at[0] if open_at else len(reports))
        confirmed = client.confirmed.get(0, Confirmed(1, 0, 0))
        assert confirmed == expected if saved else confirmed <= expected
        for report in reports[: confirmed.number]:
            self.confirmed |= report.done
        for report in reports[: confirmed.unconfirmed]:
            self.confirmed |= report.unconfirmed
        assert self.confirmed <= stored

    async def _stop_and_start(self) -> None:
        """Stop in order: exactly the events that are not done come again."""
        final = await self.circle.stop()
        self._matches(final)
        self._begin_again(final)
        await self._settle()

    async def _crash(self) -> None:
        """What was not saved comes again, too."""
        for name in list(self.circle.group.members):
            self.clients[name].leave()
        await self.circle.stop()
        for key in KEYS:
            self.done[key] = set(self._done_in(self.saved, key))
        self._begin_again(self.saved)
        await self._settle()

    def _begin_again(self, checkpoint: Checkpoint) -> None:
        for held in self.held.values():
            held.clear()
        for reports in self.reports.values():
            reports.clear()
        for client in self.clients.values():
            client.confirmed.clear()
        lane = self.circle.lane
        lane.attach(checkpoint)
        lane.read_again()

    # ---- expectations of the model ---------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Let all pending work happen, and receive the events."""
        for _ in range(3):
            await self.circle.rest()
            self.circle.lane.unpark()
        await self.circle.rest()
        self._hear()

    def _hear(self) -> None:
        for name, client in self.clients.items():
            for each in client.take():
                self._came(name, each)

    def _came(self, name: str, each: DeliveredBatch) -> None:
        key = each.batch.stream.key
        batch, held, done = self.batches[key][each.batch.offset], self.held[key], self.done[key]
        numbers = [batch[index] for index in indexes(each)]
        assert payloads([each]) == [str(number) for number in numbers]
        for number in numbers:
            assert number not in done, f"{key} {number} comes to {name}, and is done"
            assert (key, number) not in self.confirmed, f"{key} {number} comes to {name}, and is confirmed"
            assert held.get(number, name) == name, f"{key} {number} comes to {name}, but {held[number]} holds it"
            held[number] = name
            before = [n for n in self._undone(key) if n < number and held.get(n) != name]
            assert not before, f"{key} {number} comes to {name} before {before}"

    def _undone(self, key: str) -> Iterator[int]:
        return (n for batch in self.batches[key].values() for n in batch if n not in self.done[key])

    def _look(self) -> None:
        """Note the events that were taken back: a silent consumer, or one that came back with less credit, holds
        none."""
        for name, client in self.clients.items():
            for key, held in self.held.items():
                for offset, batch in self.batches[key].items():
                    if (0, offset) not in client.member.in_flight:
                        for number in [n for n in batch if held.get(n) == name]:
                            del held[number]

    def _drop(self, name: str) -> None:
        for held in self.held.values():
            for number in [n for n, by in held.items() if by == name]:
                del held[number]

    def _here(self, name: str) -> bool:
        member = self.circle.group.members.get(name)
        return member is not None and member.connected and self.clients[name].gone is None

    def _pick(self, pick: int) -> tuple[str, str, int]:
        """Who holds some of a batch, and which."""
        pairs = {
            (held[number], key, offset): None
            for key, held in self.held.items()
            for offset, batch in self.batches[key].items()
            for number in batch
            if number in held
        }
        return list(pairs)[pick % len(pairs)]

    def _done_in(self, checkpoint: Checkpoint, key: str) -> Iterator[int]:
        behind = checkpoint.behind.get(stream(key))
        token = behind.token if behind else SequenceToken(checkpoint.next_offset)
        for offset, batch in self.batches[key].items():
            for index, number in enumerate(batch):
                ranges = behind.done if behind else ()
                if (offset, index) < token or any(o == offset and f <= index < last for o, f, last in ranges):
                    yield number

    def _matches(self, checkpoint: Checkpoint) -> None:
        for key in KEYS:
            assert set(self._done_in(checkpoint, key)) == self.done[key]

    @invariant()
    def a_member_has_the_next_event(self) -> None:
        """It holds if a consumer has credit enough, and no event waits to be read again."""
        members = [self.clients[name].member for name in NAMES if self._here(name)]
        if self.mode is Mode.BOUND or not any(m.credit_bytes > PLENTY // 2 and m.credit_events > 100 for m in members):
            return
        for key in KEYS:
            following = next(self._undone(key), None)
            cursor = self.circle.delivery.progress.cursors.get(stream(key))
            if following is not None and cursor is not None and cursor.state is not CursorState.PARKED:
                assert following in self.held[key], f"nobody was given {key} {following}"

    @invariant()
    def numbers_add_up(self) -> None:
        for name in NAMES:
            if self._here(name):
                member = self.clients[name].member
                mine = sum(by == name for held in self.held.values() for by in held.values())
                assert member.in_flight_events == mine
                assert bool(member.in_flight_bytes) == bool(mine)
                assert min(member.credit_events, member.credit_bytes) >= 0

    def teardown(self) -> None:
        """Everything is delivered in the end."""
        if hasattr(self, "circle"):
            self.run(self._end())
        self.loop.close()

    async def _end(self) -> None:
        for name in list(self.circle.group.members):
            self.clients[name].leave()
            self._drop(name)
        await self._connect("0", (PLENTY, PLENTY))
        while any(self.held.values()):
            for key in KEYS:
                for offset, batch in self.batches[key].items():
                    if any(n in self.held[key] for n in batch):
                        await self._acknowledge("0", key, offset, 0, 0, up_to=False)
        for key in KEYS:
            assert not list(self._undone(key))
        await self.circle.stop()


TestGroup = GroupMachine.TestCase
TestGroup.settings = settings(max_examples=examples(30), stateful_step_count=50, deadline=None)
