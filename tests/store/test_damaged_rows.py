"""Rows of the control store that do not match their checksum: reported, never used, and other rows go on."""

import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import pytest_asyncio

from headrace import DataDirectoryError, DeadLetter, Selector, SequenceToken, StreamId, SubscriptionDefinition
from headrace.store.control_store import ControlStore
from headrace.streams.events import ScheduledBatch
from headrace.streams.subscriptions import Checkpoint
from tests.store.delay_places import Clock, add

STREAM = StreamId("flights", "N14228")
Change = Callable[[str], None]


@pytest.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.second_way)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "control.db")


@pytest_asyncio.fixture
async def store(where: str) -> AsyncIterator[ControlStore]:
    store = await ControlStore.open(where)
    for name in ("stats", "other"):
        definition = SubscriptionDefinition(name=name, selector=Selector("flights/*"))
        await store.create_subscription("p", definition, {queue: Checkpoint(5) for queue in range(2)})
    yield store
    await store.aclose()


@pytest.fixture
def change(where: str) -> Change:
    """Run UPDATE statements beside the store."""

    def run(statement: str) -> None:
        connection: Any = psycopg.connect(where) if "://" in where else sqlite3.connect(where)
        with closing(connection):
            assert connection.execute(f"UPDATE {statement}").rowcount == 1
            connection.commit()

    return run


def letter(offset: int) -> DeadLetter:
    return DeadLetter(
        0, "p", "stats", 1, STREAM, SequenceToken(offset), b"payload", {"a": "b"}, "id", 10, "boom", 8, 20
    )  # fmt: skip


LETTER_CHANGES = (
    "queue = 2",
    "token_offset = 77",
    "token_index = 1",
    "stream = 'flights/other'",
    "stream = 'x'",
    "payload = decode('7061796c6f6165', 'hex')",
    """attributes = '{"id":"ie","headers":{}}'""",
    "attributes = 'x'",
    "timestamp_us = 11",
)


@pytest.mark.parametrize("damage", LETTER_CHANGES)
async def test_a_damaged_dead_letter_is_reported_and_the_others_are_listed(
    store: ControlStore, where: str, change: Change, damage: str, caplog: pytest.LogCaptureFixture
):
    ids = await store.add_dead_letters([letter(offset) for offset in range(4)], None)
    await store.request_redrive("p", "stats")
    if "://" not in where:
        damage = damage.replace("decode('7061796c6f6165', 'hex')", "x'7061796c6f6165'")
    change(f"dead_letters SET {damage} WHERE id = {ids[1]}")
    whole = [ids[0], ids[2], ids[3]]
    with caplog.at_level(logging.ERROR):
        assert [one.id for one in await store.dead_letters("p", limit=3)] == whole
        assert [one.id for one in await store.redrives("p", ["stats"], limit=3)] == whole
    named = f"table dead_letters, provider 'p', subscription 'stats', id {ids[1]}: the row is damaged"
    (line,) = [record.message for record in caplog.records]
    assert named in line
    with pytest.raises(DataDirectoryError, match=named):
        await store.dead_letter(ids[1])
    assert [one for one in await store.damaged_rows() if named in one.problem]
    assert await store.delete_dead_letters("p", "stats", [ids[1]]) == 1
    assert await store.damaged_rows() == []


async def test_later_changes_leave_a_dead_letter_whole(store: ControlStore):
    (first,) = await store.add_dead_letters([letter(1)], None)
    await store.add_dead_letters([letter(1)._replace(reason="again", attempts=9)], None)
    await store.request_redrive("p", "stats")
    await store.finish_redrive(first, delivered=False, reason="once more", attempts=10, failed_at_us=30)
    assert (await store.dead_letter(first)).reason == "once more"


CHECKPOINT_CHANGES = (
    "next_offset = next_offset + 1048576",
    "next_offset = next_offset - 1",
    "watermark = 4",
    """behind = '[["flights","x",3,0,""]]'""",
    "epoch = 1048576, next_offset = 1048576",
)


@pytest.mark.parametrize("damage", CHECKPOINT_CHANGES)
async def test_a_damaged_checkpoint_is_not_used_until_the_subscription_is_moved(
    store: ControlStore, change: Change, damage: str, caplog: pytest.LogCaptureFixture
):
    change(f"checkpoints SET {damage} WHERE subscription = 'stats' AND queue = 1")
    named = "table checkpoints, provider 'p', subscription 'stats', queue 1: the row is damaged .*subscriptions seek"
    for refused in (
        store.attach("p", "stats"),
        store.attach("p", "stats", exclusive=False),
        store.checkpoints("p", "stats"),
        store.watermarks("p"),
    ):
        with pytest.raises(DataDirectoryError, match=named):
            await refused
    assert (await store.attach("p", "other")).checkpoints == {0: Checkpoint(5), 1: Checkpoint(5)}
    assert await store.watermarks("p", apart_from=["stats"]) == {0: 5, 1: 5}
    with caplog.at_level(logging.ERROR):
        assert await store.checkpoints_of_queue("p", 1) == {"other": Checkpoint(5)}
    assert "subscription 'stats', queue 1" in caplog.text
    assert len(await store.damaged_rows()) == 1

    await store.seek("p", "stats", {0: Checkpoint(3), 1: Checkpoint(3)}, "a row was damaged")
    assert (await store.attach("p", "stats")).checkpoints == {0: Checkpoint(3), 1: Checkpoint(3)}
    assert await store.watermarks("p") == {0: 3, 1: 3}
    assert await store.damaged_rows() == []


async def test_a_damaged_delayed_batch_is_put_aside_and_the_others_are_released(
    store: ControlStore, where: str, change: Change, caplog: pytest.LogCaptureFixture
):
    clock = Clock()
    delays = store.delay_store(clock)
    batches = [
        ScheduledBatch.of_events(STREAM, [payload], timedelta(seconds=1), None) for payload in (b"a", b"b", b"c")
    ]
    await add(delays, "p", [(0, batch) for batch in batches])
    other = batches[2].undelayed().encoded.hex()
    value = f"decode('{other}', 'hex')" if "://" in where else f"x'{other}'"
    change(f"delayed_batches SET batch = {value} WHERE id = 2")
    clock.now_s += 2
    with caplog.at_level(logging.ERROR):
        (release,) = await delays.claim("p", "me", 10)
    assert [[*batch.payloads()] for batch in release.batches] == [[b"a"], [b"c"]]
    assert "table delayed_batches, provider 'p', queue 0, id 2: the row is damaged" in caplog.text
    await delays.released("p", {0: release.number})
    assert await delays.claim("p", "me", 10) == []
    assert await delays.due_in_s("p", "me") is None
    assert await delays.backlogs("p") == {}
    assert len(await store.damaged_rows()) == 1


@pytest.mark.parametrize("value", ["CAST(x'666c69ff' AS TEXT)", "7", "NULL", "2.5", "x'ff'"])
@pytest.mark.parametrize("column", ["stream", "payload", "attributes", "timestamp_us"])
async def test_a_value_of_another_kind_does_not_hide_other_rows(tmp_path: Path, value: str, column: str):
    """In SQLite a flipped bit may change the type of a value, too."""
    async with aclosing(await ControlStore.open(tmp_path / "control.db")) as store:
        first, second = await store.add_dead_letters([letter(1), letter(2)], None)
        with closing(sqlite3.connect(tmp_path / "control.db")) as database:
            database.execute("PRAGMA writable_schema = ON")
            database.execute("UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '') WHERE name = 'dead_letters'")
            database.commit()
        with closing(sqlite3.connect(tmp_path / "control.db")) as database:
            database.execute(f"UPDATE dead_letters SET {column} = {value} WHERE id = {first}")
            database.commit()
        assert [one.id for one in await store.dead_letters("p")] == [second]
