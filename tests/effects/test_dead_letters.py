"""Dead letters of subscriptions with effects: a redrive applies each event once, and refuses events that it does not
know."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from headrace import Effects, Event, Provider, StreamState, Transaction, Unavailable
from headrace.effects import administration, schema
from headrace.effects.effects import EffectsInScope
from headrace.streams.subscriptions import DeadLetter
from headrace.streams.transactions import EffectCounts, EffectScope, MisplacedEvent, RedriveRefused
from tests.effects.databases import UserDatabase, user_database
from tests.effects.test_transactional_handlers import ONCE, batch_at, event_at, in_scope, write_all_down, write_down


async def give_up(effects: EffectsInScope, events: Sequence[Event]) -> None:
    """As the delivery does around the store of the dead letters."""
    await effects.failed(events)
    await effects.given_up(events)


# ---- events of another queue -----------------------------------------------------------------------------------------


def in_queue(database: UserDatabase, queue: int, **options: Any) -> EffectsInScope:
    scope = EffectScope("here", "billing", queue, 1)
    return Effects(database.engine, **options).scoped(write_down, scope, EffectCounts(), batch=False)


@pytest.mark.parametrize("options", [{}, {"state": StreamState()}])
async def test_an_event_in_another_queue_than_its_stream_is_given_up_and_applied_by_a_redrive(
    database: UserDatabase, options: dict[str, Any]
):
    """Offsets of two queues have no order: the event must not count as applied because its offset is lower."""
    home, other = in_queue(database, 0, **options), in_queue(database, 1, **options)
    await home.call(event_at(5))
    for offset in (3, 8):
        for _ in range(2):
            with pytest.raises(MisplacedEvent, match="is in queue 1, and others that are applied are in queue 0"):
                await other.call(event_at(offset))
        await give_up(other, [event_at(offset)])
    await home.call(event_at(6))
    for offset in (3, 8, 3):
        await other.redrive(event_at(offset))
    await home.call(event_at(7))
    assert database.log() == ["42@5", "42@6", "42@3", "42@8", "42@7"]


# ---- one scope -------------------------------------------------------------------------------------------------------


async def test_an_event_given_up_on_is_applied_once_by_redrives(database: UserDatabase):
    effects, counts = in_scope(database)
    await effects.call(event_at(5))
    await give_up(effects, [event_at(6)])
    await give_up(effects, [event_at(6)])  # it is repeated if it is not known to have succeeded
    await effects.call(event_at(6))  # a delivery after a crash
    await effects.call(event_at(7))
    assert (database.log(), counts.already_applied) == (["42@5", "42@7"], 1)
    await effects.redrive(event_at(6))
    await effects.redrive(event_at(6))
    assert (database.log(), counts.already_applied) == (["42@5", "42@7", "42@6"], 2)
    assert database.rows("SELECT unapplied, token_offset FROM headrace_position") == [(0, 7)]


async def test_a_redrive_of_an_event_that_the_effects_do_not_know_is_refused(database: UserDatabase):
    """It was given up on before the subscription had effects; later events of its stream are applied."""
    effects, _ = in_scope(database)
    for _ in range(2):
        with pytest.raises(
            RedriveRefused, match=r"'headrace effects unknown URL --apply'.*'headrace deadletters delete'"
        ):
            await effects.redrive(event_at(6))
    await effects.call(event_at(7))
    with pytest.raises(RedriveRefused):
        await effects.redrive(event_at(6))
    assert database.log() == ["42@7"]
    assert database.rows("SELECT token_offset, outcome FROM headrace_unapplied") == [(6, "unknown")]


async def test_a_refused_event_that_is_delivered_after_all_is_known_to_be_applied(database: UserDatabase):
    effects, counts = in_scope(database)
    with pytest.raises(RedriveRefused):
        await effects.redrive(event_at(6))
    await effects.call(event_at(6))
    await effects.redrive(event_at(6))
    assert (database.log(), counts.already_applied) == (["42@6"], 1)


@pytest.mark.parametrize("stored", [False, True])
async def test_a_crash_before_the_dead_letter_or_after_it_neither_loses_nor_repeats_the_event(
    database: UserDatabase, *, stored: bool
):
    """The process ended before `given_up`: the event is delivered again. If its dead letter is stored, a redrive may
    come before that delivery, or after it."""
    effects, counts = in_scope(database)
    await effects.failed([event_at(6)])
    after, counts = in_scope(database)
    if stored:
        await after.redrive(event_at(6))
    await after.call(event_at(6))
    await after.call(event_at(7))
    assert counts.already_applied == stored
    await after.redrive(event_at(6))
    assert (database.log(), counts.already_applied) == (["42@6", "42@7"], 1 + stored)
    assert database.rows("SELECT unapplied FROM headrace_position") == [(0,)]


async def test_a_crash_before_given_up_does_not_repeat_an_event_of_a_batch_that_is_redriven_first(
    database: UserDatabase,
):
    effects, counts = in_scope(database, write_all_down, batch=True)
    batch = batch_at(6, 3)
    events = batch.events()
    await effects.failed(events[1:])
    await effects.redrive(events[1])
    assert database.log() == ["42@6.1"]
    await effects.call(batch)
    assert (database.log(), counts.already_applied) == (["42@6.1", "42@6", "42@6.2"], 1)
    await effects.redrive(events[2])
    assert (len(database.log()), counts.already_applied) == (3, 2)


async def test_a_redrive_before_the_delivery_counts_with_a_state_too(async_database: UserDatabase):
    async def count(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        tx.state = (tx.state or 0) + 1

    effects, counts = in_scope(async_database, count, state=StreamState())
    await effects.call(event_at(5))
    await effects.failed([event_at(6)])
    await effects.redrive(event_at(6))
    await effects.call(event_at(6))
    await effects.call(event_at(7))
    assert (async_database.log(), counts.already_applied) == (["42@5", "42@6", "42@7"], 1)
    assert async_database.rows("SELECT state, unapplied FROM headrace_position") == [(b"3", 0)]


async def test_a_restored_database_refuses_redrives_that_it_has_forgotten(database: UserDatabase):
    effects, _ = in_scope(database)
    await effects.call(event_at(5))
    await give_up(effects, [event_at(6)])
    database.execute("DELETE FROM headrace_unapplied")
    database.execute("UPDATE headrace_position SET token_offset = 5, unapplied = 0")  # the backup is from before
    await effects.call(event_at(7))
    with pytest.raises(RedriveRefused):
        await effects.redrive(event_at(6))
    assert database.log() == ["42@5", "42@7"]


async def test_an_event_with_the_position_of_a_lost_one_does_not_stand_for_it(database: UserDatabase):
    """A queue that lost its end gives positions again, under a higher generation."""
    effects, _ = in_scope(database)
    await give_up(effects, [event_at(6)])
    again, _ = in_scope(database, generation=2)
    other = event_at(6)
    other.timestamp_us, other.payload = 2, b"other"
    await again.call(other)
    await again.redrive(event_at(6))
    assert database.log() == ["other", "42@6"]


async def test_a_failed_redrive_can_be_repeated(database: UserDatabase):
    effects, _ = in_scope(database)
    await give_up(effects, [event_at(6)])
    database.execute("INSERT INTO log (value) VALUES ('42@6')")
    with pytest.raises(IntegrityError):
        await effects.redrive(event_at(6))
    database.execute("DELETE FROM log")
    await effects.redrive(event_at(6))
    assert database.log() == ["42@6"]


async def test_two_redrives_at_once_apply_an_event_once(database: UserDatabase):
    first, counts = in_scope(database)
    second, others = in_scope(database)
    for offset in range(10):
        await give_up(first, [event_at(offset)])
        await asyncio.gather(first.redrive(event_at(offset)), second.redrive(event_at(offset)))
    assert len(database.log()) == 10
    assert counts.already_applied + others.already_applied == 10


async def test_an_event_that_is_skipped_is_never_applied(database: UserDatabase):
    effects, _ = in_scope(database)
    await effects.given_up([event_at(6)])
    await effects.call(event_at(6))
    assert database.log() == []


async def test_giving_up_does_not_hide_an_event_that_another_owner_has_applied(database: UserDatabase):
    effects, _ = in_scope(database)
    other, _ = in_scope(database)
    await other.call(event_at(6))
    await give_up(effects, [event_at(6)])
    await effects.redrive(event_at(6))
    assert database.log() == ["42@6"]


async def test_after_a_seek_back_a_redrive_does_not_repeat_an_event_that_was_applied_again(database: UserDatabase):
    before, _ = in_scope(database)
    await give_up(before, [event_at(6)])
    after, _ = in_scope(database, generation=2)
    await after.redrive(event_at(6))
    await after.call(event_at(5))  # a redrive does not move the position
    await after.call(event_at(6))  # it was applied in this generation
    assert database.log() == ["42@6", "42@5"]
    database.execute("DELETE FROM log")
    await give_up(before, [event_at(9)])  # an owner of before the seek
    last, _ = in_scope(database, generation=3)
    await last.call(event_at(9))
    with pytest.raises(RedriveRefused):
        await last.redrive(event_at(9))
    await give_up(last, [event_at(10)])
    later, _ = in_scope(database, generation=4)
    await later.call(event_at(10))
    await later.redrive(event_at(10))
    assert database.log() == ["42@9", "42@10"]


async def test_an_event_that_fails_again_after_a_seek_back_can_be_redriven_again(database: UserDatabase):
    before, _ = in_scope(database)
    await give_up(before, [event_at(6)])
    await before.redrive(event_at(6))
    database.execute("DELETE FROM log")
    after, _ = in_scope(database, generation=2)
    await give_up(after, [event_at(6)])
    await after.redrive(event_at(6))
    assert database.log() == ["42@6"]


# ---- tables of before ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "psycopg"])
async def test_tables_of_version_1_are_migrated(kind: str, tmp_path: Path, schema_url: Callable[[], str]):
    async with user_database(kind, str(tmp_path / "user.db"), schema_url) as database:
        database.make_version(1)
        row = "'here', 'billing', 'orders/42'"
        database.execute(f"INSERT INTO headrace_unapplied VALUES ({row}, 6, 0, 1)")
        database.execute(
            "INSERT INTO headrace_position (origin, subscription, stream, generation, queue, token_offset, "
            f"token_index, unapplied, revision, written_at_us) VALUES ({row}, 1, 0, 6, 0, 1, 1, 1)"
        )
        with database.inspecting.begin() as connection:
            assert schema.migrate(connection)
            assert not schema.migrate(connection)
        effects, _ = in_scope(database)
        await effects.redrive(event_at(6))
        assert database.log() == ["42@6"]


# ---- a provider ------------------------------------------------------------------------------------------------------


async def until_redriven(provider: Provider) -> Sequence[DeadLetter]:
    """Wait until no redrive is requested any more. Return the dead letters that are left."""
    async with asyncio.timeout(30):
        while True:
            letters = await provider.dead_letters("billing")
            if not any(letter.redrive for letter in letters):
                return letters
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("batch", [False, True])
async def test_a_dead_letter_is_applied_when_it_is_redriven(
    async_database: UserDatabase, tmp_path: Path, *, batch: bool
):
    fails = True

    async def handle(delivered: Any, tx: Transaction) -> None:
        for event in delivered if batch else [delivered]:
            await write_down(event, tx)
            if fails and event.payload == b"bad":
                raise ValueError

    async with Provider.open(tmp_path / "data", queues=1) as provider:
        options: Any = {"batch": batch, "retry": ONCE, "circuit_breaker": False}
        one = await provider.subscribe("billing", "orders/*", handle, effects=Effects(async_database.engine), **options)
        for payload in (b"first", b"bad", b"last"):
            await provider.stream("orders", "42").publish(payload)
        await one.caught_up()
        assert async_database.log() == ["first", "last"]
        fails = False
        assert await one.redrive() == 1
        assert not await until_redriven(provider)
        assert async_database.log() == ["first", "last", "bad"]
        assert provider.statistics().subscriptions[0].already_applied == 0


async def test_a_dead_letter_from_before_the_effects_stays_until_the_operator_decides(
    async_database: UserDatabase, tmp_path: Path
):
    async def fail(_: Event) -> None:
        raise ValueError("not yet")

    async with Provider.open(tmp_path / "data", queues=1) as provider:
        options: Any = {"retry": ONCE, "circuit_breaker": False}
        plain = await provider.subscribe("billing", "orders/*", fail, **options)
        stream = provider.stream("orders", "42")
        await stream.publish([b"before", b"discarded"])
        await plain.caught_up()
        await plain.close()
        effects = Effects(async_database.engine)
        one = await provider.subscribe("billing", "orders/*", write_down, effects=effects, **options)
        await stream.publish(b"after")
        await one.caught_up()
        letters = list[DeadLetter]()
        for _ in range(2):
            assert await one.redrive() == 2
            letters = list(await until_redriven(provider))
            assert [(letter.payload, letter.attempts) for letter in letters] == [(b"before", 1), (b"discarded", 1)]
            for letter in letters:
                assert letter.reason.startswith("it is not known whether the effects of this event are applied")
                assert letter.reason.endswith("it had failed with: ValueError: not yet")
                assert letter.reason.count("it had failed with") == 1
        assert async_database.log() == ["after"]

        with async_database.inspecting.begin() as connection:
            unknown = administration.unknown_events(connection, "billing")
            assert [(each.stream, each.token) for each in unknown] == [("orders/42", (0, 0)), ("orders/42", (0, 1))]
            assert [each[4:6] for each in administration.summaries(connection)] == [(0, 2)]
            assert administration.apply_unknown(connection, "other") == 0
            assert administration.apply_unknown(connection, "billing") == 2
        assert await provider.delete_dead_letters("billing", [letters[1].id]) == 1
        assert await one.redrive() == 1
        assert not await until_redriven(provider)
        assert async_database.log() == ["after", "before"]


async def test_a_redrive_during_an_outage_is_no_attempt(async_database: UserDatabase, tmp_path: Path):
    error: Exception = ValueError("bad")

    async def handle(_: Event, tx: Transaction) -> None:
        raise error

    async with Provider.open(tmp_path / "data", queues=1) as provider:
        options: Any = {"retry": ONCE, "circuit_breaker": False, "effects": Effects(async_database.engine)}
        one = await provider.subscribe("billing", "orders/*", handle, **options)
        await provider.stream("orders", "42").publish(b"bad")
        await one.caught_up()
        for reason in ("the mail server is away", "the mail server is late"):
            error = Unavailable(reason)
            await one.redrive()
            (letter,) = await until_redriven(provider)
            assert letter.reason == f"Unavailable: {reason}; it had failed with: ValueError: bad"
            assert letter.attempts == 1


async def test_a_redrive_that_was_applied_before_a_crash_is_not_repeated(async_database: UserDatabase, tmp_path: Path):
    """The process ended after the commit of the redrive, and before the dead letter was deleted."""
    fails = True

    async def handle(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        if fails:
            raise ValueError

    async with Provider.open(tmp_path / "data", queues=1) as provider:
        options: Any = {"retry": ONCE, "circuit_breaker": False, "effects": Effects(async_database.engine)}
        one = await provider.subscribe("billing", "orders/*", handle, **options)
        await provider.stream("orders", "42").publish(b"bad")
        await one.caught_up()
        letters = await provider.dead_letters("billing")
        fails = False
        await one.redrive()
        assert not await until_redriven(provider)
        await provider.store.add_dead_letters(letters, None)
        await one.redrive()
        assert not await until_redriven(provider)
        assert async_database.log() == ["bad"]
        assert provider.statistics().subscriptions[0].already_applied == 1


async def test_a_kill_between_the_dead_letter_and_the_effects_is_seen_by_a_redrive(
    async_database: UserDatabase, tmp_path: Path
):
    """The handler succeeds when the event is delivered again: the redrive must not apply it once more."""
    fails = True
    handled: list[bytes] = []

    async def handle(event: Event, tx: Transaction) -> None:
        if fails:
            raise ValueError
        handled.append(event.payload)
        await tx.execute(text("INSERT INTO log (value) SELECT COUNT(*) || :value FROM log"), {"value": "."})

    options: Any = {"retry": ONCE, "circuit_breaker": False}
    async with Provider.open(tmp_path / "data", queues=1) as provider:
        effects = _WithoutGivenUp(async_database.engine)
        one = await provider.subscribe("billing", "orders/*", handle, effects=effects, **options)
        await provider.stream("orders", "42").publish(b"bad")
        async with asyncio.timeout(30):
            while not await provider.dead_letters("billing"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await one.close()
        fails = False
        again = await provider.subscribe(
            "billing", "orders/*", handle, effects=Effects(async_database.engine), **options
        )
        await again.caught_up()
        assert async_database.log() == ["0."]
        assert await again.redrive() == 1
        assert not await until_redriven(provider)
        assert (async_database.log(), handled) == (["0."], [b"bad"])


class _WithoutGivenUp(Effects):
    """Effects of a process that stands still before `given_up`."""

    def scoped(self, *args: Any, **options: Any) -> Any:
        return _NeverGivesUp(super().scoped(*args, **options))


class _NeverGivesUp:
    def __init__(self, scoped: EffectsInScope) -> None:
        self.call, self.redrive, self.failed = scoped.call, scoped.redrive, scoped.failed

    async def given_up(self, _: Sequence[Event]) -> None:
        await asyncio.Event().wait()
