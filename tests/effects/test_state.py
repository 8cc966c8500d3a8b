"""The state of a stream, in the row of its position."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from headrace import (
    Effects,
    Event,
    EventBatch,
    InvalidArgument,
    NotFound,
    NotSupported,
    StreamId,
    StreamState,
    Transaction,
)
from headrace.effects import administration
from headrace.effects.positions import StreamPosition
from headrace.streams.errors import PayloadTooLarge
from headrace.streams.transactions import EffectCounts, EffectScope
from tests.client.consumers import until
from tests.effects.databases import UserDatabase, user_database
from tests.effects.test_dead_letters import give_up
from tests.effects.test_transactional_handlers import STREAM, batch_at, event_at, in_scope, write_down

KEPT = StreamState()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"version": 1 << 31}, "version is 2147483648: expected an integer from 1 to 2,147,483,647"),
        ({"ttl": timedelta.max}, "ttl is .*: expected a timedelta above 0 and up to 1,000,000 days, or None"),
    ],
)
def test_options_that_the_columns_cannot_store_are_refused(options: dict[str, Any], reason: str):
    with pytest.raises(InvalidArgument, match=reason):
        StreamState(**options)


async def count(event: Event, tx: Transaction) -> None:
    """Count the events of the stream in its state, and write the count down."""
    tx.state = {"count": (tx.state or {"count": 0})["count"] + 1}
    await write_down(event, tx)


def states(database: UserDatabase) -> list[Any]:
    return [value for (value,) in database.rows("SELECT state FROM headrace_position ORDER BY stream")]


async def test_state_and_effects_are_committed_together(database: UserDatabase):
    effects, counts = in_scope(database, count, state=KEPT)
    for offset in (5, 6, 6, 5, 7):
        await effects.call(event_at(offset))
    assert (states(database), database.log()) == ([b'{"count":3}'], ["42@5", "42@6", "42@7"])
    assert counts.already_applied == 2


async def test_a_failed_handler_leaves_the_state(database: UserDatabase):
    fails = False

    async def fail(event: Event, tx: Transaction) -> None:
        await count(event, tx)
        if fails:
            raise ValueError

    effects, _ = in_scope(database, fail, state=KEPT)
    await effects.call(event_at(5))
    fails = True
    with pytest.raises(ValueError):
        await effects.call(event_at(6))
    fails = False
    await effects.call(event_at(6))
    assert states(database) == [b'{"count":2}']


async def test_a_savepoint_of_a_handler_that_fails_is_rolled_back(database: UserDatabase):
    """The drivers of SQLite would begin the transaction with the savepoint, and commit when it is released."""
    fails = False

    def add(session: Session, value: str) -> None:
        with session.begin_nested():
            session.execute(text("INSERT INTO log (value) VALUES (:value)"), {"value": value})

    async def handle(event: Event, tx: Transaction) -> None:
        await tx.run(add, str(event.token))
        tx.state = str(event.token)
        if fails:
            raise ValueError

    effects, _ = in_scope(database, handle, state=KEPT)
    for offset in (5, 6):  # the second time, the state is in memory
        fails = True
        with pytest.raises(ValueError):
            await effects.call(event_at(offset))
        fails = False
        await effects.call(event_at(offset))
    assert len(database.log()) == 2


async def test_after_a_redrive_the_next_handler_runs_once(database: UserDatabase):
    """The redrive changes the row that the process remembers."""
    calls: list[int] = []

    async def handle(event: Event, tx: Transaction) -> None:
        assert event.token is not None
        calls.append(event.token.offset)
        await count(event, tx)

    effects, _ = in_scope(database, handle, state=KEPT)
    await give_up(effects, [event_at(5)])
    await effects.redrive(event_at(5))
    await effects.call(event_at(6))
    await effects.redrive(event_at(5))
    await effects.call(event_at(7))
    assert (calls, states(database)) == ([5, 6, 7], [b'{"count":3}'])


async def test_two_owners_lose_no_change_of_the_state(database: UserDatabase):
    both = [in_scope(database, count, state=KEPT)[0] for _ in range(2)]
    for offset in range(20):
        await asyncio.gather(*(effects.call(event_at(offset)) for effects in both))
    await both[0].call(event_at(20))
    assert states(database) == [b'{"count":21}']
    assert len(database.log()) == 21


async def test_a_batch_counts_only_the_events_that_are_not_applied(async_database: UserDatabase):
    async def count_all(batch: EventBatch, tx: Transaction) -> None:
        tx.state = (tx.state or 0) + batch.count

    effects, _ = in_scope(async_database, count_all, batch=True, state=KEPT)
    single, _ = in_scope(async_database, count, state=StreamState(upgrade=lambda value, version: value))
    await single.call(event_at(5, 0))
    administration_set(async_database, b"1")
    await effects.call(batch_at(5, 3))
    assert states(async_database) == [b"3"]


async def test_a_state_that_was_set_from_outside_is_seen_by_the_next_event(async_database: UserDatabase):
    effects, _ = in_scope(async_database, count, state=KEPT)
    await effects.call(event_at(5))
    administration_set(async_database, b'{"count":10}')
    await effects.call(event_at(6))
    assert states(async_database) == [b'{"count":11}']
    administration_set(async_database, None)
    await effects.call(event_at(7))
    assert states(async_database) == [b'{"count":1}']


def administration_set(database: UserDatabase, value: bytes | None, **options: Any) -> None:
    with database.inspecting.begin() as connection:
        administration.set_state(connection, "billing", STREAM, value, **options)


async def test_a_state_that_is_set_from_outside_keeps_the_time_to_live(async_database: UserDatabase):
    ends = "SELECT expires_at_us FROM headrace_position"
    effects, _ = in_scope(async_database, count, state=StreamState(ttl=timedelta(days=1)))
    await effects.call(event_at(5))
    (end,) = async_database.rows(ends)
    administration_set(async_database, b'{"count":10}')
    assert async_database.rows(ends) == [end]
    async_database.execute("UPDATE headrace_position SET expires_at_us = 1")
    administration_set(async_database, b'{"count":11}')  # the former state is over, so its end says nothing
    assert async_database.rows(ends) == [(None,)]
    async_database.execute("UPDATE headrace_position SET expires_at_us = 9000000000000000")
    administration_set(async_database, None)
    assert async_database.rows(ends) == [(None,)]


async def test_a_state_can_be_set_before_the_first_event(async_database: UserDatabase):
    with pytest.raises(NotFound, match="give --origin"):
        administration_set(async_database, b'{"count":10}')
    administration_set(async_database, b'{"count":10}', origin="here")
    effects, counts = in_scope(async_database, count, generation=0, state=KEPT)
    await effects.call(event_at(0))
    assert (states(async_database), counts.already_applied) == ([b'{"count":11}'], 0)


async def test_a_state_is_set_while_a_handler_inserts_the_row(schema_url: Callable[[], str]):
    async with user_database("psycopg-async", "", schema_url) as database:
        inserted, blocked = asyncio.Event(), asyncio.Event()
        pids: list[int] = []

        async def handle(event: Event, tx: Transaction) -> None:
            await write_down(event, tx)
            pids.append((await tx.execute(text("SELECT pg_backend_pid()"))).scalar_one())
            inserted.set()
            await blocked.wait()

        effects, _ = in_scope(database, handle)
        handler = asyncio.create_task(effects.call(event_at(5)))
        await inserted.wait()
        options: Any = {"origin": "here", "version": 3}
        setting = asyncio.create_task(asyncio.to_thread(administration_set, database, b"7", **options))
        waiting = "SELECT COUNT(*) FROM pg_stat_activity WHERE :pid = ANY(pg_blocking_pids(pid))"
        async with asyncio.timeout(30):
            while database.rows(waiting, pid=pids[0]) == [(0,)]:  # noqa: ASYNC110 (the database does not tell)
                await asyncio.sleep(0.01)
        blocked.set()
        await asyncio.gather(handler, setting)
        columns = "token_offset, revision, state, state_version"
        assert database.rows(f"SELECT {columns} FROM headrace_position") == [(5, 2, b"7", 3)]


async def test_a_redrive_changes_the_state_and_not_the_position(async_database: UserDatabase):
    effects, _ = in_scope(async_database, count, state=KEPT)
    await effects.call(event_at(5))
    await give_up(effects, [event_at(6)])
    await effects.call(event_at(7))
    await effects.redrive(event_at(6))
    await effects.redrive(event_at(6))
    await effects.call(event_at(7))
    await effects.call(event_at(8))
    assert states(async_database) == [b'{"count":4}']
    assert async_database.rows("SELECT token_offset FROM headrace_position") == [(8,)]


async def test_a_state_ends_after_its_time_to_live(async_database: UserDatabase):
    effects, _ = in_scope(async_database, count, state=StreamState(ttl=timedelta(days=1)))
    await effects.call(event_at(5))
    await effects.call(event_at(6))
    async_database.execute("UPDATE headrace_position SET expires_at_us = 1, revision = revision + 1")
    await effects.call(event_at(7))
    assert states(async_database) == [b'{"count":1}']


async def test_a_state_of_another_version_is_upgraded(async_database: UserDatabase):
    async def append(event: Event, tx: Transaction) -> None:
        tx.state = [*(tx.state or []), event.payload.decode()]

    old, _ = in_scope(async_database, count, state=KEPT)
    await old.call(event_at(5))
    new, _ = in_scope(async_database, append, state=StreamState(version=2))
    with pytest.raises(InvalidArgument, match="the stored state has version 1, and this handler has version 2"):
        await new.call(event_at(6))

    def upgrade(value: Any, version: int) -> Any:
        return [f"{value['count']} of version {version}"]

    upgraded, _ = in_scope(async_database, append, state=StreamState(version=2, upgrade=upgrade))
    await upgraded.call(event_at(6))
    assert states(async_database) == [b'["1 of version 1","42@6"]']


async def test_a_state_that_cannot_be_read_fails_no_event_that_is_applied(async_database: UserDatabase):
    """A handler of an older version gets such an event after a crash, and becomes no dead letter."""
    newer, _ = in_scope(async_database, count, state=StreamState(version=2))
    await newer.call(event_at(5))
    await give_up(newer, [event_at(6)])
    await newer.redrive(event_at(6))
    older, counts = in_scope(async_database, count, state=KEPT)
    await older.call(event_at(5))
    await older.redrive(event_at(6))
    assert (counts.already_applied, async_database.log()) == (2, ["42@5", "42@6"])
    with pytest.raises(InvalidArgument, match="the stored state has version 2"):
        await older.call(event_at(7))


async def test_a_state_of_bytes(async_database: UserDatabase):
    async def append(event: Event, tx: Transaction) -> None:
        tx.state = (tx.state or b"") + b"\0\xff"

    effects, _ = in_scope(async_database, append, state=StreamState(format="bytes", max_bytes=4))
    await effects.call(event_at(5))
    await effects.call(event_at(6))
    with pytest.raises(
        PayloadTooLarge, match=r"tx\.state has 6 bytes, the limit is 4: raise StreamState\(max_bytes=\.\.\.\)"
    ):
        await effects.call(event_at(7))
    assert states(async_database) == [b"\0\xff\0\xff"]


async def test_wrong_states_are_refused(async_database: UserDatabase):
    async def assign(event: Event, tx: Transaction) -> None:
        tx.state = value

    value: Any = object()
    for options, message in ((KEPT, "cannot be encoded as JSON"), (StreamState(format="bytes"), "is bytes here")):
        effects, _ = in_scope(async_database, assign, state=options)
        with pytest.raises(InvalidArgument, match=message):
            await effects.call(event_at(5))
    without, _ = in_scope(async_database, assign)
    with pytest.raises(NotSupported, match="state=StreamState"):
        await without.call(event_at(5))
    with pytest.raises(InvalidArgument, match="a StreamState, or None"):
        Effects(async_database.engine, state=True)  # pyright: ignore[reportArgumentType]
    for wrong in ({"format": "xml"}, {"max_bytes": 0}, {"version": 0}, {"ttl": timedelta()}):
        with pytest.raises(InvalidArgument):
            StreamState(**wrong)  # pyright: ignore[reportArgumentType]


def test_an_upgrade_that_is_async_is_refused():
    async def upgrade(state: Any, _: int) -> Any:
        return state

    with pytest.raises(InvalidArgument, match=r"upgrade is .*: expected a plain function: write `def` instead of"):
        StreamState(upgrade=upgrade)
    with pytest.raises(InvalidArgument, match="upgrade is 2: expected a function or None"):
        StreamState(upgrade=2)  # pyright: ignore[reportArgumentType]


async def test_a_state_that_is_nested_too_deeply_is_refused(async_database: UserDatabase):
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]

    async def assign(_: Event, tx: Transaction) -> None:
        tx.state = deep

    effects, _ = in_scope(async_database, assign, state=KEPT)
    with pytest.raises(InvalidArgument, match=r"tx\.state cannot be encoded as JSON"):
        await effects.call(event_at(5))


async def test_more_streams_than_are_kept_in_memory(async_database: UserDatabase):
    """Rows that are not in memory are read again."""
    large = "x" * 60_000

    async def keep(event: Event, tx: Transaction) -> None:
        before: list[Any] = tx.state or ["", 0]
        tx.state = [large, before[1] + 1]

    effects, _ = in_scope(async_database, keep, state=KEPT)
    for offset in (5, 6):
        for number in range(80):
            await effects.call(event_at(offset, stream=StreamId("orders", str(number))))
    assert {int(value[-2:-1]) for value in states(async_database)} == {2}


async def test_prune_deletes_old_positions_and_keeps_states_and_events_to_redrive(async_database: UserDatabase):
    effects, _ = in_scope(async_database)
    for key in ("old", "redrivable", "new"):
        await effects.call(event_at(5, stream=StreamId("orders", key)))
    await give_up(effects, [event_at(6, stream=StreamId("orders", "redrivable"))])
    options = StreamState(ttl=timedelta(days=1))
    scope = EffectScope("here", "counting", 0, 1)
    keeping = Effects(async_database.engine, state=options).scoped(count, scope, EffectCounts(), batch=False)
    for key in ("kept", "ended"):
        await keeping.call(event_at(7, stream=StreamId("orders", key)))
    async_database.execute("UPDATE headrace_position SET written_at_us = 1 WHERE stream <> 'orders/new'")
    async_database.execute("UPDATE headrace_position SET expires_at_us = 1 WHERE stream = 'orders/ended'")
    with async_database.inspecting.begin() as connection:
        assert administration.prune(connection, timedelta(days=1), "elsewhere") == (0, 0)
        assert administration.prune(connection, timedelta(days=1)) == (1, 2)
    left = [stream for (stream,) in async_database.rows("SELECT stream FROM headrace_position ORDER BY stream")]
    assert left == ["orders/kept", "orders/new", "orders/redrivable"]


async def test_prune_counts_an_event_that_fails_meanwhile(schema_url: Callable[[], str]):
    async with user_database("psycopg-async", "", schema_url) as database:
        effects, _ = in_scope(database)
        await effects.note_unknown(event_at(5))
        database.execute("UPDATE headrace_unapplied SET changed_at_us = 1")

        def prune() -> None:
            with database.inspecting.begin() as connection:
                administration.prune(connection, timedelta(days=1))

        with database.inspecting.begin() as connection:
            StreamPosition(EffectScope("here", "billing", 0, 1), STREAM).note_failed(connection, [event_at(6)])
            pruning = asyncio.create_task(asyncio.to_thread(prune))
            await until(lambda: bool(database.rows("SELECT 1 FROM pg_locks WHERE NOT granted")))
        await pruning
        await effects.call(event_at(6))  # after a crash, its dead letter is stored already
        await effects.redrive(event_at(6))
        assert database.log() == ["42@6"]


@pytest.mark.parametrize("kind", ["sqlite", "aiosqlite"])
async def test_a_handler_with_state_reads_and_creates_in_its_transaction(kind: str, tmp_path: Path):
    """By itself, the driver begins the transaction only with the first INSERT, UPDATE or DELETE."""

    async def fail(_: Event, tx: Transaction) -> None:
        await tx.execute(text("SELECT * FROM log"))
        with closing(sqlite3.connect(tmp_path / "user.db", timeout=0)) as other:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("INSERT INTO log (value) VALUES ('other')")
        await tx.execute(text("CREATE TABLE made (id INTEGER)"))
        raise ValueError("on purpose")

    async with user_database(kind, str(tmp_path / "user.db"), lambda: "") as database:
        effects, _ = in_scope(database, fail, state=KEPT)
        with pytest.raises(ValueError, match="on purpose"):
            await effects.call(event_at(5))
        assert database.rows("SELECT name FROM sqlite_master WHERE name = 'made'") == []
