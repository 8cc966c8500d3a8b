"""The control store: stored data, refused calls, and fencing."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from headrace import (
    Closed,
    DeadLetter,
    DefinitionConflict,
    Fenced,
    GapRecord,
    InvalidArgument,
    Mode,
    NotFound,
    RetryPolicy,
    Selector,
    SequenceToken,
    Start,
    StorageError,
    StreamId,
    SubscriptionDefinition,
)
from headrace.store.control_store import ControlStore, ProviderRecord
from headrace.store.token_record import TokenRecord
from headrace.streams.clock import replaced_clock
from headrace.streams.subscriptions import Checkpoint, StreamBehind, of_consumer

TAIL = StreamId("flights", "N14228")


@pytest.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.second_way)])
def lasting(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The kinds of store that several processes can open."""
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "control.db")


@pytest_asyncio.fixture(params=["memory", "file", pytest.param("postgres", marks=pytest.mark.second_way)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ControlStore]:
    where = {"memory": "memory", "file": str(tmp_path / "control.db"), "postgres": ""}[request.param]
    store = await ControlStore.open(where or request.getfixturevalue("postgres_url"))
    yield store
    await store.aclose()


@pytest_asyncio.fixture
async def two(lasting: str) -> AsyncIterator[tuple[ControlStore, ControlStore]]:
    """Two stores in one place, as two processes have them."""
    first, second = [await ControlStore.open(lasting) for _ in range(2)]
    yield first, second
    await first.aclose()
    await second.aclose()


def definition(name: str = "stats", selector: str = "flights/*") -> SubscriptionDefinition:
    return SubscriptionDefinition(name=name, selector=Selector(selector))


async def created(store: ControlStore, name: str = "stats", **start: Checkpoint) -> None:
    positions = {int(queue[1:]): checkpoint for queue, checkpoint in start.items()}
    assert await store.create_subscription("p", definition(name), positions)


def letter(offset: int = 5, subscription: str = "stats", reason: str = "boom", attempts: int = 8) -> DeadLetter:
    return DeadLetter(
        id=0,
        provider="p",
        subscription=subscription,
        queue=3,
        stream=TAIL,
        token=SequenceToken(offset, 1),
        payload=b"\x00\xff payload",
        headers={"carrier": "UA"},
        event_id="flight-1",
        timestamp_us=1_357_034_400_000_000,
        reason=reason,
        attempts=attempts,
        failed_at_us=1_763_719_200_000_000,
    )


# Providers


async def test_a_provider_is_remembered_and_may_be_registered_again(store: ControlStore):
    for _ in range(2):
        await store.register_provider("flights", adapter="log", queues=8, mapper="ring")
    await store.register_provider("another", adapter="memory", queues=1, mapper="ring")
    assert await store.providers() == [
        ProviderRecord("another", "memory", 1, "ring"),
        ProviderRecord("flights", "log", 8, "ring"),
    ]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (
            ProviderRecord("x", "log", 4, "ring"),
            "provider 'x' has 8 queues, not 4: the number is fixed at creation because",
        ),
        (ProviderRecord("x", "memory", 8, "ring"), "keeps its events with the adapter 'log', not 'memory'"),
        (ProviderRecord("x", "log", 8, "ring-2"), "maps streams with 'ring', not 'ring-2'"),
    ],
)
async def test_a_provider_that_was_made_otherwise_is_refused(store: ControlStore, other: ProviderRecord, why: str):
    await store.register_provider("x", adapter="log", queues=8, mapper="ring")
    with pytest.raises(InvalidArgument, match=why):
        await store.register_provider("x", adapter=other.adapter, queues=other.queues, mapper=other.mapper)
    assert await store.providers() == [ProviderRecord("x", "log", 8, "ring")]


async def test_a_provider_without_queues_is_refused(store: ControlStore):
    with pytest.raises(InvalidArgument, match="provider 'x' needs at least 1 queue, not 0"):
        await store.register_provider("x", adapter="log", queues=0, mapper="ring")


# Subscriptions


async def test_creating_a_subscription_pins_where_it_starts(store: ControlStore):
    start = {0: Checkpoint(17), 5: Checkpoint(0)}
    assert await store.create_subscription("p", definition(), start) is True
    assert await store.subscription("p", "stats") == definition()
    assert await store.checkpoints("p", "stats") == start


async def test_creating_it_again_changes_nothing(store: ControlStore):
    await created(store, q0=Checkpoint(17))
    assert await store.create_subscription("p", definition(), {0: Checkpoint(99)}) is False
    assert await store.checkpoints("p", "stats") == {0: Checkpoint(17)}


async def test_another_definition_is_a_conflict_that_names_the_differences(store: ControlStore):
    await created(store)
    other = SubscriptionDefinition(
        name="stats", selector=Selector("flights/N1*"), start=Start.earliest(), retry=RetryPolicy(max_attempts=3)
    )
    with pytest.raises(DefinitionConflict) as caught:
        await store.create_subscription("p", other, {})
    message = str(caught.value)
    assert "selector is flights/*, not flights/N1*" in message
    assert "start is latest, not earliest" in message
    assert '"max_attempts":3' in message
    assert "on_failure" not in message
    assert "or give its progress up with 'headrace subscriptions delete' and create it again" in message
    assert await store.subscription("p", "stats") == definition()


async def test_names_belong_to_a_provider(store: ControlStore):
    await created(store)
    assert await store.create_subscription("q", definition(selector="other/*"), {})
    assert await store.subscriptions("q") == [definition(selector="other/*")]
    assert await store.subscriptions("p") == [definition()]


async def test_subscriptions_are_listed_by_name(store: ControlStore):
    for name in ("b", "a", "c"):
        await created(store, name)
    assert [each.name for each in await store.subscriptions("p")] == ["a", "b", "c"]


async def test_every_field_of_a_definition_is_kept(store: ControlStore):
    full = SubscriptionDefinition.__struct_fields__
    one = SubscriptionDefinition(
        name="x",
        selector=Selector("n/größe%0A"),
        start=Start.at(SequenceToken(4, 2)),
        retry=RetryPolicy(max_attempts=2, max_elapsed_s=0.1),
        filter="only \x00 late",
    )
    await store.create_subscription("p", one, {})
    stored = await store.subscription("p", "x")
    assert [getattr(stored, field) for field in full] == [getattr(one, field) for field in full]


async def test_missing_records_are_not_found(store: ControlStore):
    for call in (
        store.subscription("p", "gone"),
        store.delete_subscription("p", "gone"),
        store.attach("p", "gone"),
        store.checkpoints("p", "gone"),
        store.seek("p", "gone", {}, "test"),
        store.request_redrive("p", "gone"),
    ):
        with pytest.raises(NotFound, match="provider 'p' has no subscription 'gone'"):
            await call
    with pytest.raises(NotFound, match="there is no dead letter 17"):
        await store.dead_letter(17)


async def test_deleting_a_subscription_keeps_its_dead_letters_only(store: ControlStore):
    await created(store, q0=Checkpoint(4))
    await store.add_dead_letters([letter()], None)
    await store.add_gaps([GapRecord("p", "stats", 0, None, SequenceToken(1), SequenceToken(2), "old", 1)])
    await store.delete_subscription("p", "stats")
    assert await store.subscriptions("p") == []
    assert await store.watermarks("p") == {}
    assert await store.gaps("p") == []
    assert len(await store.dead_letters("p")) == 1
    assert await store.delete_dead_letters("p", "stats") == 1


# Progress


async def test_the_position_of_a_consumer_needs_its_subscription(store: ControlStore):
    wanted, other = (replace(definition("s"), mode=Mode.BROADCAST, selector=Selector(f"{n}/*")) for n in "no")
    with pytest.raises(NotFound, match=r"no subscription 's'$"):
        await store.create_subscription("p", of_consumer(wanted, "c"), {0: Checkpoint(1)})
    await store.create_subscription("p", other, {})
    with pytest.raises(Fenced, match="'s' was deleted, and has another definition now"):
        await store.create_subscription("p", of_consumer(wanted, "c"), {0: Checkpoint(1)})
    assert await store.subscriptions("p") == [other]
    assert not await store.watermarks("p")
    assert [await store.create_subscription("p", of_consumer(other, "c"), {}) for _ in range(2)] == [True, False]


async def test_deleting_a_subscription_deletes_the_positions_of_its_consumers(store: ControlStore):
    parents = [replace(definition(name), mode=Mode.BROADCAST) for name in ("s", "S", "s-2")]
    for parent in parents:
        await store.create_subscription("p", parent, {})
        for consumer in ("a", "b"):
            await store.create_subscription("p", of_consumer(parent, consumer), {0: Checkpoint(1)})
    await store.seek("p", "s~b", {0: Checkpoint(2)}, "test")
    moved = await store.generation("p", "s~b")
    await store.delete_subscription("p", "s")
    assert {one.name for one in await store.subscriptions("p")} == {"S", "S~a", "S~b", "s-2", "s-2~a", "s-2~b"}
    assert set(await store.checkpoints_of_queue("p", 0)) == {"S~a", "S~b", "s-2~a", "s-2~b"}
    await store.create_subscription("p", parents[0], {})
    await store.create_subscription("p", of_consumer(parents[0], "b"), {0: Checkpoint(1)})
    assert (await store.attach("p", "s~b")).generation > moved


@pytest.mark.parametrize("mode", Mode)
async def test_a_subscription_that_is_made_anew_has_no_positions_of_the_deleted_one(tmp_path: Path, mode: Mode):
    """A silo of version 0.2.0 left some behind if a consumer joined during the deletion. They hold the watermark."""
    old, new = (replace(definition("s"), mode=Mode.BROADCAST, selector=Selector(f"{n}/*")) for n in "no")
    new = replace(new, mode=mode)
    store = await ControlStore.open(str(tmp_path / "control.db"))
    await store.create_subscription("p", old, {})
    await store.create_subscription("p", of_consumer(old, "c"), {0: Checkpoint(1)})
    with closing(sqlite3.connect(tmp_path / "control.db")) as database, database:
        database.execute("DELETE FROM subscriptions WHERE name = 's'")
    await store.create_subscription("p", new, {})
    assert await store.subscriptions("p") == [new]
    assert not await store.watermarks("p")
    assert await store.create_subscription("p", of_consumer(new, "c"), {})
    assert not await store.checkpoints("p", "s~c")
    await store.aclose()


async def test_attaching_returns_where_it_stands_under_a_higher_epoch(store: ControlStore):
    await created(store, q0=Checkpoint(17))
    first = await store.attach("p", "stats")
    second = await store.attach("p", "stats")
    assert first.checkpoints == second.checkpoints == {0: Checkpoint(17)}
    assert second.epoch > first.epoch > 0


async def test_progress_is_kept_with_the_streams_that_are_behind(two: tuple[ControlStore, ControlStore]):
    here, there = two
    await created(here, q0=Checkpoint(1))
    attachment = await here.attach("p", "stats")
    behind = {
        TAIL: StreamBehind(SequenceToken(7, 3), 'ValueError: "no" größe'),
        StreamId("größe\0", "%/\n"): StreamBehind(SequenceToken((1 << 63) - 1)),
    }
    now = {0: Checkpoint(10, behind), 3: Checkpoint(2)}
    assert not await here.save_checkpoints("p", [("stats", attachment.epoch, now)])
    assert await there.checkpoints("p", "stats") == now


async def test_a_queue_says_where_all_subscriptions_stand_in_it(store: ControlStore):
    behind = Checkpoint(12, {TAIL: StreamBehind(SequenceToken(4, 9))})
    await created(store, "a", q0=Checkpoint(10), q1=Checkpoint(7))
    await created(store, "b", q0=behind)
    await store.create_subscription("other", definition("c"), {0: Checkpoint(0)})
    assert await store.checkpoints_of_queue("p", 0) == {"a": Checkpoint(10), "b": behind}
    assert await store.checkpoints_of_queue("p", 1) == {"a": Checkpoint(7)}
    assert await store.checkpoints_of_queue("p", 2) == await store.checkpoints_of_queue("none", 0) == {}


async def test_rough_text_is_kept_in_a_checkpoint(store: ControlStore):
    await created(store)
    epoch = (await store.attach("p", "stats")).epoch
    rough = {0: Checkpoint(8, {TAIL: StreamBehind(SequenceToken(3), "nul \0 and \ud800")})}
    await store.save_checkpoints("p", [("stats", epoch, rough)])
    assert (await store.checkpoints("p", "stats"))[0].behind[TAIL].paused == "nul \\x00 and \\ud800"


async def test_thousands_of_streams_may_be_behind(store: ControlStore):
    await created(store)
    epoch = (await store.attach("p", "stats")).epoch
    behind = {StreamId("n", str(number)): StreamBehind(SequenceToken(number)) for number in range(10_000)}
    await store.save_checkpoints("p", [("stats", epoch, {0: Checkpoint(1 << 40, behind)})])
    assert (await store.checkpoints("p", "stats"))[0].behind == behind
    assert await store.watermarks("p") == {0: 0}


async def test_a_write_under_a_stale_epoch_is_refused_and_others_are_stored(two: tuple[ControlStore, ControlStore]):
    here, there = two
    for name in ("a", "b", "c"):
        await created(here, name, q0=Checkpoint(1))
    epochs = {name: (await here.attach("p", name)).epoch for name in ("a", "b", "c")}
    await there.attach("p", "b")
    await there.delete_subscription("p", "c")
    progress = [(name, epochs[name], {0: Checkpoint(5)}) for name in ("a", "b", "c")]
    assert (await here.save_checkpoints("p", [*progress, ("never", 1, {0: Checkpoint(5)})])).subscriptions == [
        "b",
        "c",
        "never",
    ]
    assert await there.checkpoints("p", "a") == {0: Checkpoint(5)}
    assert await there.checkpoints("p", "b") == {0: Checkpoint(1)}


async def test_epochs_of_a_deleted_subscription_never_come_back(store: ControlStore):
    await created(store)
    old = (await store.attach("p", "stats")).epoch
    await store.delete_subscription("p", "stats")
    await created(store, q0=Checkpoint(3))
    assert (await store.save_checkpoints("p", [("stats", old, {0: Checkpoint(9)})])).subscriptions == ["stats"]
    assert (await store.attach("p", "stats")).epoch > old
    assert await store.checkpoints("p", "stats") == {0: Checkpoint(3)}


async def test_a_late_checkpoint_of_the_same_epoch_is_ignored(store: ControlStore):
    await created(store)
    epoch = (await store.attach("p", "stats")).epoch
    newer = {0: Checkpoint(8), 1: Checkpoint(8, {TAIL: StreamBehind(SequenceToken(3))})}
    await store.save_checkpoints("p", [("stats", epoch, newer)])
    late = {0: Checkpoint(7), 1: Checkpoint(8), 2: Checkpoint(0)}
    assert not await store.save_checkpoints("p", [("stats", epoch, late)])
    assert await store.checkpoints("p", "stats") == {0: Checkpoint(8), 1: Checkpoint(8), 2: Checkpoint(0)}


async def test_a_save_that_is_carried_out_late_is_ignored(store: ControlStore):
    """An acknowledgement that was confirmed as saved stays saved."""
    await created(store)
    epoch = (await store.attach("p", "stats")).epoch

    async def save(position: Checkpoint, revision: int) -> None:
        assert not await store.save_checkpoints("p", [("stats", epoch, {0: position})], revision=revision)

    await save(Checkpoint(8, {TAIL: StreamBehind(SequenceToken(3))}), 2)
    await save(Checkpoint(8, {TAIL: StreamBehind(SequenceToken(2))}), 1)
    assert await store.checkpoints("p", "stats") == {0: Checkpoint(8, {TAIL: StreamBehind(SequenceToken(3))})}
    await save(Checkpoint(8), 3)
    assert await store.checkpoints("p", "stats") == {0: Checkpoint(8)}


async def test_a_seek_moves_back_and_fences_the_attached_process(two: tuple[ControlStore, ControlStore]):
    here, there = two
    await created(here, q0=Checkpoint(100), q1=Checkpoint(100))
    old = (await here.attach("p", "stats")).epoch
    epoch = await there.seek("p", "stats", {0: Checkpoint(20)}, "replay")
    assert epoch > old
    assert (await here.save_checkpoints("p", [("stats", old, {0: Checkpoint(101)})])).subscriptions == ["stats"]
    assert await here.checkpoints("p", "stats") == {0: Checkpoint(20), 1: Checkpoint(100)}


async def test_a_seek_raises_the_generation_and_nothing_else_does(two: tuple[ControlStore, ControlStore]):
    here, there = two
    await created(here, q0=Checkpoint(100))
    await created(here, "other", q0=Checkpoint(100))
    attachment = await here.attach("p", "stats")
    assert attachment.generation == 0
    await here.save_checkpoints("p", [("stats", attachment.epoch, {0: Checkpoint(101)})])
    for now_us, generation in ((1000, 1000), (1000, 1001), (900, 1002), (2000, 2000)):
        with replaced_clock(lambda now_us=now_us: now_us):
            await there.seek("p", "stats", {0: Checkpoint(20)}, "replay")
        assert (await here.attach("p", "stats", exclusive=False)).generation == generation
    assert (await here.attach("p", "stats")).generation == await there.generation("p", "stats") == 2000
    assert (await here.attach("p", "other")).generation == 0
    with pytest.raises(NotFound):
        await here.generation("p", "unknown")


async def test_a_subscription_that_is_created_again_has_a_higher_generation(store: ControlStore):
    """A consumer of the deleted one may still name events that it acknowledged. A restored store does not know the
    generations that it has lost: the clock is above them."""
    with replaced_clock(lambda: 1000):
        await created(store)
        await store.seek("p", "stats", {0: Checkpoint(20)}, "replay")
        for generation in (1001, 1002):
            await store.delete_subscription("p", "stats")
            await created(store)
            assert (await store.attach("p", "stats")).generation == generation
        await created(store, "other")
        await store.delete_subscription("p", "other")
        await created(store, "third")
        assert (await store.attach("p", "third")).generation == 1003
    with replaced_clock(lambda: 2000):
        await store.delete_subscription("p", "third")
        await created(store, "fourth")
    assert (await store.attach("p", "fourth")).generation == 2000


async def test_a_paused_stream_is_resumed_with_all_that_is_done_of_it(two: tuple[ControlStore, ControlStore]):
    here, there = two
    behind = StreamBehind(SequenceToken(3), "no", ((3, 2, 4),))
    await created(here, q0=Checkpoint(8, {TAIL: behind}), q1=Checkpoint(5))
    old = await here.attach("p", "stats")
    assert await there.resume("p", "stats", TAIL)
    assert not await there.resume("p", "stats", TAIL)
    assert not await there.resume("p", "stats", StreamId("n", "other"))
    stored = {0: Checkpoint(8, {TAIL: behind._replace(paused="")}), 1: Checkpoint(5)}
    assert await here.checkpoints("p", "stats") == stored
    refused = await here.save_checkpoints("p", [("stats", old.epoch, {0: Checkpoint(8, {TAIL: behind})})])
    assert refused.subscriptions == ["stats"]
    assert (await here.attach("p", "stats")).generation == old.generation


async def test_the_watermark_is_the_lowest_of_all_subscriptions(store: ControlStore):
    await created(store, "a", q0=Checkpoint(10), q1=Checkpoint(7))
    await created(store, "b", q0=Checkpoint(12, {TAIL: StreamBehind(SequenceToken(4, 9))}))
    await store.create_subscription("other", definition("c"), {0: Checkpoint(0)})
    assert await store.watermarks("p") == {0: 4, 1: 7}
    assert await store.watermarks("p", apart_from=["b"]) == {0: 10, 1: 7}
    assert await store.watermarks("none") == {}


@pytest.mark.parametrize(
    "checkpoint",
    [
        Checkpoint(1 << 63),
        Checkpoint(-1),
        Checkpoint(5, {TAIL: StreamBehind(SequenceToken(1 << 63))}),
        Checkpoint(5, {TAIL: StreamBehind(SequenceToken(0, -1))}),
    ],
)
async def test_a_position_that_64_bits_do_not_hold_is_refused(store: ControlStore, checkpoint: Checkpoint):
    await created(store, q0=Checkpoint((1 << 63) - 1))
    epoch = (await store.attach("p", "stats")).epoch
    with pytest.raises(InvalidArgument, match="holds positions from 0 to 9223372036854775807, not"):
        await store.save_checkpoints("p", [("stats", epoch, {1: Checkpoint(3), 0: checkpoint})])
    assert await store.checkpoints("p", "stats") == {0: Checkpoint((1 << 63) - 1)}


async def test_save_stores_the_state_at_the_time_of_the_call(store: ControlStore):
    await created(store)
    epoch = (await store.attach("p", "stats")).epoch
    behind = {TAIL: StreamBehind(SequenceToken(3))}
    saving = asyncio.ensure_future(store.save_checkpoints("p", [("stats", epoch, {0: Checkpoint(8, behind)})]))
    await asyncio.sleep(0)
    behind.clear()
    await saving
    assert await store.watermarks("p") == {0: 3}


# Dead letters and gaps


async def test_a_dead_letter_is_kept_whole(store: ControlStore):
    (letter_id,) = await store.add_dead_letters([letter()], None)
    stored = await store.dead_letter(letter_id)
    assert stored == letter()._replace(id=letter_id)
    assert await store.dead_letters("p") == [stored]


async def test_rough_text_is_kept_in_a_dead_letter(store: ControlStore):
    rough = letter(reason="nul \0 and \ud800")._replace(
        stream=StreamId("a/b\0", "%"), headers={"": "\0", "ä": "\n"}, event_id="\0", payload=b""
    )
    (letter_id,) = await store.add_dead_letters([rough], None)
    assert await store.dead_letter(letter_id) == rough._replace(id=letter_id, reason="nul \\x00 and \\ud800")


async def test_giving_up_twice_on_one_event_makes_one_dead_letter(store: ControlStore):
    first = await store.add_dead_letters([letter(5), letter(6)], None)
    again = await store.add_dead_letters([letter(6, reason="worse", attempts=9), letter(7)], None)
    assert again[0] == first[1]
    assert len({*first, *again}) == 3
    stored = await store.dead_letter(first[1])
    assert (stored.reason, stored.attempts) == ("worse", 9)
    assert await store.add_dead_letters([letter(6)._replace(subscription="other")], None) != [first[1]]


async def test_events_that_got_the_same_position_are_each_a_dead_letter(store: ControlStore):
    """A queue that lost its end gives positions again."""
    await created(store)
    old, new = letter(reason="old"), letter(reason="new")._replace(payload=b"another")
    later = letter(reason="later")._replace(timestamp_us=old.timestamp_us + 1)
    moved = letter(reason="moved")._replace(stream=StreamId("flights", "other"))
    events = [old, new, later, moved, letter(reason="id")._replace(event_id=None)]
    ids = await store.add_dead_letters(events, None)
    assert await store.add_dead_letters([*reversed(events)], None) == [*reversed(ids)]
    found = await store.dead_letters("p", "stats")
    assert found == [each._replace(id=number) for each, number in zip(events, ids, strict=True)]
    assert await store.request_redrive("p", "stats", ids[:2]) == 2
    await store.finish_redrive(ids[1], delivered=True, reason=None, attempts=9, failed_at_us=70)
    assert [each.reason for each in await store.redrives("p", ["stats"])] == ["old"]
    assert await store.delete_dead_letters("p", "stats", [ids[0]]) == 1
    assert [each.reason for each in await store.dead_letters("p")] == ["later", "moved", "id"]


async def test_a_subscription_redrives_no_dead_letter_of_a_deleted_one_with_its_name(store: ControlStore):
    await created(store)
    old = await store.add_dead_letters([letter(offset) for offset in range(1100)], None)
    assert await store.request_redrive("p", "stats") == 1100
    await store.delete_subscription("p", "stats")
    assert await store.redrives("p", ["stats"]) == []
    await store.create_subscription("p", definition(selector="trains/*"), {})
    own = letter(2000)._replace(stream=StreamId("trains", "1"))
    ids = await store.add_dead_letters([own], None)
    assert await store.redrives("p", ["stats"]) == []
    assert await store.request_redrive("p", "stats", [*old, *ids]) == 1
    assert await store.request_redrive("p", "stats", old) == 0
    assert await store.request_redrive("p", "stats") == 1
    assert [each.stream for each in await store.redrives("p", ["stats"])] == [own.stream]


async def test_a_subscription_redrives_a_dead_letter_from_before_it_was_created_again(store: ControlStore):
    await created(store)
    ids = await store.add_dead_letters([letter()], None)
    await store.delete_subscription("p", "stats")
    await created(store)
    assert await store.request_redrive("p", "stats") == 1
    assert [each.id for each in await store.redrives("p", ["stats"])] == ids


async def test_dead_letters_are_counted_and_deleted_by_their_streams(store: ControlStore):
    await created(store)
    trains = [letter(offset)._replace(stream=StreamId("trains", str(offset))) for offset in range(3)]
    flights = [letter(5), letter(6)]
    ids = await store.add_dead_letters([*trains, *flights], None)
    assert await store.count_left_behind("p", "stats") == (5, 0)
    assert await store.count_left_behind("p", "stats", Selector("trains/*")) == (3, 0)
    assert await store.count_left_behind("p", "stats", Selector("trains/?*")) == (3, 0)
    assert await store.count_left_behind("p", "stats", Selector("trains/1")) == (1, 0)
    assert await store.delete_dead_letters("p", "stats", [*ids[1:]], Selector("trains/1")) == 1
    assert await store.delete_dead_letters("p", "stats", None, Selector("trains/*")) == 2
    assert await store.count_left_behind("p", "stats") == (2, 0)


async def test_dead_letters_are_fenced(two: tuple[ControlStore, ControlStore]):
    here, there = two
    await created(here)
    old = (await here.attach("p", "stats")).epoch
    assert len(await here.add_dead_letters([letter(1)], old)) == 1
    await there.attach("p", "stats")
    with pytest.raises(Fenced, match=f"subscription 'stats' of 'p' is at epoch {old + 1}, not {old}"):
        await here.add_dead_letters([letter(2)], old)
    await there.delete_subscription("p", "stats")
    with pytest.raises(Fenced, match="subscription 'stats' of 'p' has been deleted"):
        await here.add_dead_letters([letter(2)], old)
    assert len(await there.dead_letters("p")) == 1


async def test_one_epoch_cannot_fence_two_subscriptions(store: ControlStore):
    with pytest.raises(InvalidArgument, match="an epoch belongs to one subscription, these records to 2"):
        await store.add_dead_letters([letter(), letter(subscription="other")], 1)
    assert await store.add_dead_letters([], 1) == []
    await store.add_gaps([], 1)


async def test_dead_letters_are_listed_page_by_page(store: ControlStore):
    ids = await store.add_dead_letters([letter(offset) for offset in range(5)], None)
    await store.add_dead_letters([letter(9, subscription="other")], None)
    first = await store.dead_letters("p", "stats", limit=3)
    rest = await store.dead_letters("p", "stats", limit=3, after_id=first[-1].id)
    assert [each.id for each in first + rest] == ids
    assert len(await store.dead_letters("p")) == 6


async def test_a_redrive_is_asked_for_and_finished(store: ControlStore):
    await created(store)
    a, b, c = await store.add_dead_letters([letter(offset) for offset in range(3)], None)
    assert await store.request_redrive("p", "stats", [a, c, 999]) == 2
    assert [each.id for each in await store.redrives("p", ["stats", "other"])] == [a, c]
    assert [each.id for each in await store.redrives("p", ["stats"], limit=1)] == [a]
    assert await store.redrives("p", ["other"]) == await store.redrives("q", ["stats"]) == []
    queue, index = letter().queue, letter().token.index
    assert await store.requested_redrives("p", "stats", queue, 0, 2) == {0: [index], 2: [index]}
    assert await store.requested_redrives("p", "stats", queue, 1, 1) == {}
    assert await store.requested_redrives("p", "stats", queue + 1, 0, 2) == {}
    assert await store.requested_redrives("p", "other", queue, 0, 2) == {}
    await store.finish_redrive(a, delivered=True, reason=None, attempts=9, failed_at_us=70)
    await store.finish_redrive(c, delivered=False, reason="still", attempts=16, failed_at_us=80)
    await store.finish_redrive(999, delivered=False, reason="gone", attempts=1, failed_at_us=90)
    assert [(each.id, each.reason, each.attempts, each.failed_at_us) for each in await store.dead_letters("p")] == [
        (b, "boom", 8, letter(1).failed_at_us),
        (c, "still", 16, 80),
    ]
    assert await store.redrives("p", ["stats"]) == []
    assert await store.request_redrive("p", "stats") == 2


async def test_letters_of_other_queues_do_not_count_against_the_limit(store: ControlStore):
    await created(store)
    letters = [letter(offset)._replace(queue=offset % 3) for offset in range(6)]
    ids = await store.add_dead_letters(letters, None)
    await store.request_redrive("p", "stats")
    assert [each.id for each in await store.redrives("p", ["stats"], queues={2, 1}, limit=3)] == [
        ids[1], ids[2], ids[4],
    ]  # fmt: skip
    assert await store.redrives("p", ["stats"], queues=[]) == []


async def test_a_redrive_that_was_asked_for_outlives_another_failure(store: ControlStore):
    await created(store)
    await store.add_dead_letters([letter()], None)
    await store.request_redrive("p", "stats")
    await store.add_dead_letters([letter(attempts=9)], None)
    assert [each.attempts for each in await store.redrives("p", ["stats"])] == [9]


async def test_ids_of_dead_letters_are_never_used_again(store: ControlStore):
    (old,) = await store.add_dead_letters([letter()], None)
    assert await store.delete_dead_letters("p", "stats", [old]) == 1
    assert (await store.add_dead_letters([letter()], None)) > [old]


async def test_deleting_takes_the_chosen_dead_letters_of_the_subscription_only(store: ControlStore):
    ids = await store.add_dead_letters([letter(offset) for offset in range(1200)], None)
    (other,) = await store.add_dead_letters([letter(subscription="other")], None)
    assert await store.delete_dead_letters("p", "stats", [*ids[:1100], ids[0], other]) == 1100
    assert await store.delete_dead_letters("p", "stats", []) == 0
    assert await store.delete_dead_letters("p", "stats") == 100
    assert [each.id for each in await store.dead_letters("p")] == [other]


async def test_gaps_are_kept_once(store: ControlStore):
    whole = GapRecord("p", "stats", 0, None, SequenceToken(0), SequenceToken(90), "retention", 5)
    one = GapRecord("p", "stats", 0, StreamId("", ""), SequenceToken(3), SequenceToken(3, 1), "skipped \0", 6)
    await store.add_gaps([whole, one])
    await store.add_gaps([whole._replace(at_us=7), one._replace(subscription="other")])
    await store.add_gaps([])
    one = one._replace(reason="skipped \\x00")
    assert await store.gaps("p", "stats") == [whole, one]
    other = one._replace(subscription="other")
    assert await store.gaps("p") == [whole, one, other]
    lost = whole._replace(reason="lost", at_us=8)  # the same events are missing for another reason
    await store.add_gaps([lost])
    assert await store.gaps("p") == [lost, one, other]


async def test_progress_of_a_deleted_subscription_is_refused_by_a_new_one_with_its_name(store: ControlStore):
    await created(store)
    shared = (await store.attach("p", "stats", exclusive=False)).epoch
    await store.delete_subscription("p", "stats")
    await created(store)
    refused = await store.save_checkpoints("p", [("stats", shared, {0: Checkpoint(90)})])
    assert refused.subscriptions == ["stats"]


async def test_gaps_are_fenced(two: tuple[ControlStore, ControlStore]):
    here, there = two
    await created(here)
    old = (await here.attach("p", "stats")).epoch
    gap = GapRecord("p", "stats", 0, None, SequenceToken(0), SequenceToken(90), "retention", 5)
    await here.add_gaps([gap], old)
    await there.attach("p", "stats")
    later = gap._replace(low=SequenceToken(90), high=SequenceToken(95))
    with pytest.raises(Fenced, match=f"subscription 'stats' of 'p' is at epoch {old + 1}, not {old}"):
        await here.add_gaps([later], old)
    assert await there.gaps("p") == [gap]
    await there.delete_subscription("p", "stats")
    with pytest.raises(Fenced, match="subscription 'stats' of 'p' has been deleted"):
        await here.add_gaps([later], old)
    assert await there.gaps("p") == []


# Entries, closing, cancelling


async def test_entries_are_kept_changed_and_deleted(two: tuple[ControlStore, ControlStore]):
    here, there = two
    assert await here.value("file") is None
    await here.set_value("file", "100")
    await there.set_value("file", "200")
    assert await here.value("file") == "200"
    await there.set_value("file", None)
    assert await here.value("file") is None


async def test_closing_finishes_pending_calls_and_refuses_later_ones(lasting: str):
    store = await ControlStore.open(lasting)
    begun = [asyncio.ensure_future(store.set_value(str(number), "x")) for number in range(5)]
    await asyncio.sleep(0)
    await store.aclose()
    await store.aclose()
    await asyncio.gather(*begun)
    with pytest.raises(Closed, match="the control store is closed"):
        await store.value("0")
    store = await ControlStore.open(lasting)
    assert [await store.value(str(number)) for number in range(5)] == ["x"] * 5
    await store.aclose()


async def test_a_cancelled_call_happens_wholly_or_not_at_all(tmp_path: Path):
    store = await ControlStore.open(tmp_path / "control.db")
    await created(store)
    epoch = (await store.attach("p", "stats")).epoch
    other = sqlite3.connect(tmp_path / "control.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    progress = [
        asyncio.ensure_future(
            store.save_checkpoints("p", [("stats", epoch, {0: Checkpoint(offset), 1: Checkpoint(offset)})])
        )
        for offset in (1, 2)
    ]
    await asyncio.sleep(0)
    for saving in progress:
        saving.cancel()
    await asyncio.gather(*progress, return_exceptions=True)
    other.execute("ROLLBACK")
    other.close()
    stored = await store.checkpoints("p", "stats")
    assert stored in ({}, *({0: Checkpoint(offset), 1: Checkpoint(offset)} for offset in (1, 2)))
    assert not await store.save_checkpoints("p", [("stats", epoch, {0: Checkpoint(3)})])
    await store.aclose()


async def test_a_locked_store_is_a_retryable_error(tmp_path: Path):
    store = await ControlStore.open(tmp_path / "control.db", timeout_s=0.05)
    other = sqlite3.connect(tmp_path / "control.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match=r"control\.db: locked by another process for 0\.05 s") as caught:
        await store.set_value("k", "v")
    assert caught.value.retryable
    assert await store.value("k") is None  # readers do not wait for writers
    other.execute("ROLLBACK")
    other.close()
    await store.set_value("k", "v")
    await store.aclose()


# Access tokens


TOKEN = TokenRecord(
    "orders", b"\x00\xff" * 16, {"publish": ("orders*", "x"), "manage": ("*",)}, 1_763_719_200_000_000, "orders"
)


async def test_tokens_are_kept_by_name(store: ControlStore):
    other = TokenRecord("audit", bytes(32), {}, 5, "audit")
    assert await store.tokens() == []
    for token in (TOKEN, other):
        await store.add_token(token)
    assert await store.tokens() == [other, TOKEN]
    await store.delete_token("audit")
    assert await store.tokens() == [TOKEN]


async def test_a_token_of_a_name_that_exists_is_refused_and_the_first_stays(store: ControlStore):
    await store.add_token(TOKEN)
    for again in (TOKEN, TOKEN._replace(hash=bytes(32))):
        with pytest.raises(DefinitionConflict, match="a token named 'orders' exists: use another name, or revoke that"):
            await store.add_token(again)
    assert await store.tokens() == [TOKEN]


async def test_a_token_that_is_not_there_cannot_be_deleted(store: ControlStore):
    with pytest.raises(NotFound, match="there is no token named 'orders'"):
        await store.delete_token("orders")


async def test_another_process_sees_tokens_come_and_go(two: tuple[ControlStore, ControlStore]):
    first, second = two
    await first.add_token(TOKEN)
    assert await second.tokens() == [TOKEN]
    await second.delete_token("orders")
    assert await first.tokens() == []
