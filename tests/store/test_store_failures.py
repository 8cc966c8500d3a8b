"""The control store on bad days: killed processes, full disks, files that are not its own, versions."""

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from headrace import (
    DataDirectoryError,
    DeadLetter,
    GapRecord,
    InvalidArgument,
    Selector,
    SequenceToken,
    StorageFull,
    StreamId,
    SubscriptionDefinition,
)
from headrace.store.control_store import ControlStore, ProviderRecord
from headrace.store.database import Database
from headrace.store.schema import MIGRATIONS, migrate
from headrace.store.token_record import TokenRecord
from headrace.streams.subscriptions import Checkpoint, StreamBehind
from tests.random_examples import examples

DEFINITION = SubscriptionDefinition(name="stats", selector=Selector("flights/*"))

# Each script is a process of its own, given the path of the store.
PRELUDE = """
import asyncio, resource, sys
from headrace import Selector, StorageFull, StreamId, SubscriptionDefinition
from headrace.streams.subscriptions import Checkpoint
from headrace.store.control_store import ControlStore
DEFINITION = SubscriptionDefinition(name="stats", selector=Selector("flights/*"))
"""

SAVES_FOR_EVER = """
async def main():
    store = await ControlStore.open(sys.argv[1])
    await store.create_subscription("p", DEFINITION, {0: Checkpoint(0), 1: Checkpoint(0)})
    attachment = await store.attach("p", "stats")
    offset = attachment.checkpoints[0].next_offset
    while True:
        offset += 1
        both = {0: Checkpoint(offset), 1: Checkpoint(offset)}
        assert not await store.save_checkpoints("p", [("stats", attachment.epoch, both)])
        print(offset, flush=True)
asyncio.run(main())
"""

ATTACHES_20_TIMES = """
async def main():
    store = await ControlStore.open(sys.argv[1])
    await store.create_subscription("p", DEFINITION, {})
    for _ in range(20):
        print((await store.attach("p", "stats")).epoch)
    await store.aclose()
asyncio.run(main())
"""

FILLS_ITS_QUOTA = """
async def main():
    store = await ControlStore.open(sys.argv[1])
    await store.create_subscription("p", DEFINITION, {})
    epoch = (await store.attach("p", "stats")).epoch
    saved = valued = 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    try:
        for round in range(2, 1000):
            await store.save_checkpoints("p", [("stats", epoch, {0: Checkpoint(round), 1: Checkpoint(round)})])
            saved = round
            await store.set_value("k", f"{round} " + "x" * 50_000)
            valued = round
    except StorageFull as error:
        print(error.retryable, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(await store.checkpoints("p", "stats") == {0: Checkpoint(saved), 1: Checkpoint(saved)})
    print((await store.value("k")).split()[0] == str(valued))
    print((await store.save_checkpoints("p", [("stats", epoch, {0: Checkpoint(5000)})])).subscriptions)
    await store.aclose()
asyncio.run(main())
"""


def process(script: str, where: Path | str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PRELUDE + script, str(where)], stdout=subprocess.PIPE, text=True)


async def output(script: str, where: Path | str) -> list[str]:
    """Return the output of a process, which must succeed."""
    with process(script, where) as running:
        out, _ = await asyncio.to_thread(running.communicate, timeout=60)
    assert running.returncode == 0
    return out.splitlines()


@asynccontextmanager
async def opened(where: str | Path) -> AsyncGenerator[ControlStore]:
    store = await ControlStore.open(where)
    try:
        yield store
    finally:
        await store.aclose()


# `test_store_postgres.py` has the failures of PostgreSQL, and `test_store_model.py` two stores on one server.
@pytest.fixture(params=["file", pytest.param("postgres", marks=[pytest.mark.second_way, pytest.mark.slow])])
def lasting(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The kinds of store that several processes can open."""
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "control.db")


async def test_a_killed_process_leaves_whole_transactions_and_all_that_it_was_told_of(lasting: str):
    told = 0
    for _ in range(2):
        with process(SAVES_FOR_EVER, lasting) as running:
            assert running.stdout is not None
            for _ in range(random.randint(1, 30)):
                told = int(await asyncio.to_thread(running.stdout.readline))
            running.send_signal(signal.SIGKILL)
            told = max([told, *map(int, running.stdout.read().split())])
        async with opened(lasting) as store:
            kept = await store.checkpoints("p", "stats")
        assert kept[0] == kept[1]
        assert told <= kept[0].next_offset <= told + 1


async def test_processes_that_make_one_store_at_once_get_different_epochs(lasting: str):
    printed = await asyncio.gather(*(output(ATTACHES_20_TIMES, lasting) for _ in range(4)))
    epochs = [int(epoch) for of_one in printed for epoch in of_one]
    assert sorted(epochs) == list(range(min(epochs), min(epochs) + 80))
    for at in range(0, 80, 20):
        assert epochs[at : at + 20] == sorted(epochs[at : at + 20])


@pytest.mark.hypothesis  # so that `make slow` makes all stores
async def test_opening_a_new_store_waits_for_others_that_do_the_same(tmp_path: Path):
    for number in range(examples(40, quick=10)):
        stores = await asyncio.gather(*(ControlStore.open(tmp_path / f"{number}.db") for _ in range(4)))
        for store in stores:
            await store.aclose()


async def test_reaching_a_quota_keeps_stored_rows_and_the_quota_can_be_raised(tmp_path: Path):
    error, *facts = await output(FILLS_ITS_QUOTA, tmp_path / "control.db")
    assert error.startswith(f"True {tmp_path / 'control.db'}: ")
    assert "nothing was changed" in error
    assert facts == ["True", "True", "[]"]


@asynccontextmanager
async def at_most(pages: int) -> AsyncGenerator[None]:
    """Databases that are opened within have no room beyond so many pages."""

    def limit(connection: Any, _record: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()

    event.listen(Engine, "connect", limit)
    try:
        yield
    finally:
        event.remove(Engine, "connect", limit)


async def test_a_full_disk_is_a_retryable_error_that_changes_nothing(tmp_path: Path):
    path = tmp_path / "control.db"
    async with at_most(60), opened(path) as store:
        await store.set_value("small", "before")
        with pytest.raises(StorageFull, match=r"control\.db: no space left; nothing was changed") as caught:
            await store.set_value("big", "x" * 1_000_000)
        assert caught.value.retryable
        assert await store.value("big") is None
        await store.set_value("small", "after")
    async with opened(path) as store:
        assert await store.value("small") == "after"
        await store.set_value("big", "x" * 1_000_000)


async def test_a_full_disk_at_the_beginning_leaves_a_file_that_can_be_used_later(tmp_path: Path):
    async with at_most(3):
        with pytest.raises(StorageFull):
            await ControlStore.open(tmp_path / "control.db")
    async with opened(tmp_path / "control.db") as store:
        assert await store.providers() == []


def a_text(path: Path) -> None:
    path.write_text("tail,carrier\nN14228,UA\n" * 100)


def another_program_s_database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE customers (id INTEGER)")
    connection.close()


def a_directory(path: Path) -> None:
    path.mkdir()


def a_newer_one(path: Path) -> None:
    asyncio.run(make(path))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE headrace_version SET version = 99")
    connection.close()


def one_without_version(path: Path) -> None:
    asyncio.run(make(path))
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM headrace_version")
    connection.close()


async def make(path: Path) -> None:
    async with opened(path) as store:
        await store.create_subscription("p", DEFINITION, {0: Checkpoint(1)})


@pytest.mark.parametrize(
    ("make_file", "why"),
    [
        (a_text, "no control store of headrace, or a damaged one"),
        (another_program_s_database, "another program's database: it has the table 'customers'"),
        (a_directory, "cannot be opened for writing"),
        (
            a_newer_one,
            r"made by a newer headrace: the control store has version 99, this one knows versions up to \d+;",
        ),
        (one_without_version, "damaged: the control store has no schema version"),
    ],
)
async def test_a_file_that_is_none_of_ours_is_refused_and_left_alone(
    tmp_path: Path, make_file: Callable[[Path], None], why: str
):
    path = tmp_path / "control.db"
    await asyncio.to_thread(make_file, path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(DataDirectoryError, match=why) as caught:
        await ControlStore.open(path)
    assert not caught.value.retryable
    assert str(caught.value).startswith(f"{path}: ")
    assert (path.read_bytes() if path.is_file() else b"")[100:] == before[100:]  # past the header: the journal mode


async def test_a_directory_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(DataDirectoryError, match=r"missing/control\.db: cannot be opened for writing"):
        await ControlStore.open(tmp_path / "missing" / "control.db")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nosuch://server/db", "the driver of this database is not installed"),
        (
            "postgresql+nosuch://me:secret@server/db",
            r"me:\*\*\*@server/db: the driver of this database is not installed",
        ),
        ("://", "is no database URL"),
    ],
)
async def test_a_url_that_cannot_be_is_refused(url: str, why: str):
    with pytest.raises(InvalidArgument, match=why):
        await ControlStore.open(url)


async def test_a_damaged_file_is_named(tmp_path: Path):
    path = tmp_path / "control.db"
    await make(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    with pytest.raises(DataDirectoryError, match=r"control\.db: .*damaged"):
        async with opened(path) as store:
            await store.subscriptions("p")


async def tokens(store: ControlStore, _provider: str, _name: str) -> object:
    return await store.tokens()


@pytest.mark.parametrize(
    ("change", "read", "what"),
    [
        ("subscriptions SET definition = '{}'", ControlStore.subscription, "a subscription"),
        ("gaps SET stream = 'x'", ControlStore.gaps, "a gap record"),
        ("tokens SET permissions = '[1]'", tokens, "token 'a'"),
    ],
)
async def test_a_damaged_row_is_named(
    tmp_path: Path, change: str, read: Callable[[ControlStore, str, str], Awaitable[object]], what: str
):
    path = tmp_path / "control.db"
    async with opened(path) as store:
        await use_everything(store)
    with sqlite3.connect(path) as connection:
        assert connection.execute(f"UPDATE {change}").rowcount > 0
    connection.close()
    async with opened(path) as store:
        with pytest.raises(DataDirectoryError, match=rf"control\.db: {what} in the control store is damaged"):
            await read(store, "p", "stats")


# Versions


def second(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE providers ADD COLUMN colour VARCHAR DEFAULT 'red'"))


def third(connection: Connection) -> None:
    connection.execute(text("UPDATE providers SET colour = 'deep ' || colour"))


def broken(connection: Connection) -> None:
    connection.execute(text("UPDATE providers SET colour = 'lost'"))
    raise RuntimeError("broken")


async def colours(path: Path | str, migrations: Sequence[Callable[[Connection], None]]) -> list[Any]:
    database = await Database.open(path, partial(migrate, migrations=migrations))
    try:
        return await database.read(lambda connection: list(connection.scalars(text("SELECT colour FROM providers"))))
    finally:
        await database.aclose()


async def test_an_older_store_is_brought_up_to_date_once_and_in_order(tmp_path: Path):
    path = tmp_path / "control.db"
    async with opened(path) as store:
        await store.register_provider("x", adapter="log", queues=8, mapper="ring")
    now = 1 + len(MIGRATIONS)
    assert await colours(path, [*MIGRATIONS, second]) == ["red"]
    assert await colours(path, [*MIGRATIONS, second, third]) == ["deep red"]
    assert await colours(path, [*MIGRATIONS, second, third]) == ["deep red"]
    with pytest.raises(RuntimeError, match="broken"):
        await colours(path, [*MIGRATIONS, second, third, broken])
    assert await colours(path, [*MIGRATIONS, second, third]) == ["deep red"]
    with pytest.raises(DataDirectoryError, match=f"has version {now + 2}, this one knows versions up to {now + 1}"):
        await colours(path, [*MIGRATIONS, second])


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_an_older_store_stays_as_it_is_while_silos_run_on_it(
    database: str, tmp_path: Path, request: pytest.FixtureRequest
):
    where = tmp_path / "control.db" if database == "sqlite" else request.getfixturevalue("postgres_url")
    migrations = [*MIGRATIONS, second]
    async with opened(where) as store:
        await store.register_provider("x", adapter="log", queues=8, mapper="ring")
        cluster = store.cluster()
        members = [await cluster.join(name, "", ["x"]) for name in ("a", "b", "c")]
        await cluster.leave(members[2])
    now = 1 + len(MIGRATIONS)
    message = f"has version {now} and has to get version {now + 1}, but silos .* run on it: 'a', 'b': stop all of them"
    with pytest.raises(DataDirectoryError, match=message):
        await colours(where, migrations)
    async with opened(where) as store:  # nothing was changed
        await store.cluster().declare_dead(members[0])
        with pytest.raises(DataDirectoryError, match="run on it: 'b': stop"):
            await colours(where, migrations)
        await store.cluster().leave(members[1])
        assert await colours(where, migrations) == ["red"]


async def test_a_silo_that_was_killed_long_ago_does_not_keep_a_store_old(tmp_path: Path):
    path = tmp_path / "control.db"
    async with opened(path) as store:
        await store.register_provider("x", adapter="log", queues=8, mapper="ring")
        await store.cluster().join("a", "", ["x"])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE silos SET heartbeat_at_us = heartbeat_at_us - 61000000")
    assert await colours(path, [*MIGRATIONS, second]) == ["red"]


FIRST = Path(__file__).with_name("control_store_v1.sql").read_text()


def tables(path: Path) -> dict[str, list[Any]]:
    """The columns of every table."""
    with closing(sqlite3.connect(path)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return {name: connection.execute(f"PRAGMA table_info({name})").fetchall() for (name,) in names}


@pytest.mark.parametrize("migrations", [[*MIGRATIONS], [*MIGRATIONS, second]])
async def test_a_store_of_the_first_version_is_brought_up_to_date_with_all_that_is_in_it(
    tmp_path: Path, migrations: list[Callable[[Connection], None]]
):
    path = tmp_path / "control.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(FIRST)
        connection.execute("INSERT INTO entries VALUES ('moves/default/stats', '3'), ('moves/default/deleted', '1')")
        connection.commit()
    stream, token = StreamId("flights", "N14228"), SequenceToken(3)
    for _ in range(2):  # once as it was, once brought up to date
        database = await Database.open(path, partial(migrate, migrations=migrations))
        async with aclosing(ControlStore(database)) as store:
            assert await store.providers() == [ProviderRecord("default", "log", 8, "ring")]
            assert await store.subscriptions("default") == [DEFINITION]
            assert await store.checkpoints("default", "stats") == {
                0: Checkpoint(7, {stream: StreamBehind(token, "boom")})
            }
            letter = await store.dead_letter(1)
            assert (letter.payload, letter.headers) == (b"\x00\xff", {"carrier": "UA"})
            assert await store.add_dead_letters([letter], None) == [1]
            assert [gap.reason for gap in await store.gaps("default")] == ["old"]
            assert await store.value("k") == "v"
            assert await store.tokens() == [TokenRecord("t", bytes(32), {"publish": ("*",)}, 1, "c")]
            assert await store.damaged_rows() == []
            attachment = await store.attach("default", "stats")
            assert (attachment.epoch > 1, attachment.generation) == (True, 3)
            assert await store.value("moves/default/stats") is None
            assert await store.value("moves/default/deleted") is None
            me = await store.cluster().join("a", "x", ["default"])
            (lease,) = await store.cluster().acquire(me, [("default", 0)], 15)
            assert (me.incarnation > 1, lease.epoch > 1) == (True, True)
            await store.cluster().leave(me)
            releases = await store.delay_store().claim("default", "other", 0)
            assert {each.queue: [batch.payloads() for batch in each.batches] for each in releases} == {
                0: [[b"later"]],
                1: [[b"claimed"]],
            }
    if len(migrations) > len(MIGRATIONS):
        assert await colours(path, migrations) == ["red"]
        return
    async with opened(tmp_path / "new.db"):
        pass
    assert tables(path) == tables(tmp_path / "new.db")


@pytest.mark.long
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize("version", [1, 5])
async def test_a_store_of_an_unreleased_version_is_refused_with_a_way_out(
    database: str, version: int, tmp_path: Path, request: pytest.FixtureRequest
):
    """Their versions say nothing about the tables of this one."""
    where = tmp_path / "control.db" if database == "sqlite" else request.getfixturevalue("postgres_url")

    def as_it_was(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE headrace_version RENAME TO headrace_schema"))
        connection.execute(text(f"UPDATE headrace_schema SET version = {version}"))

    made = await Database.open(where, migrate)
    await made.write(as_it_was)
    await made.aclose()
    for existing in (False, True):
        with pytest.raises(DataDirectoryError, match=r"made by an unreleased version .* `headrace repair control`"):
            await ControlStore.open(where, existing=existing)


async def use_everything(store: ControlStore) -> None:
    """Call every method, so that every statement is run."""
    stream, token = StreamId("flights", "N14228"), SequenceToken(3)
    letter = DeadLetter(0, "p", "stats", 0, stream, token, b"x", {}, None, 1, "boom", 8, 2)
    await store.register_provider("p", adapter="log", queues=8, mapper="ring")
    await store.providers()
    await store.create_subscription("p", DEFINITION, {0: Checkpoint(1)})
    await store.create_subscription("p", DEFINITION, {})
    await store.subscriptions("p")
    epoch = await store.seek("p", "stats", {1: Checkpoint(0)}, "test")
    await store.save_checkpoints("p", [("stats", epoch, {0: Checkpoint(2)})])
    epoch = (await store.attach("p", "stats")).epoch
    await store.checkpoints_of_queue("p", 0)
    await store.watermarks("p", apart_from=["other"])
    (letter_id,) = await store.add_dead_letters([letter], epoch)
    await store.request_redrive("p", "stats", [letter_id])
    await store.request_redrive("p", "stats")
    await store.redrives("p", ["stats"], queues=[0])
    await store.finish_redrive(letter_id, delivered=False, reason="still", attempts=9, failed_at_us=1)
    await store.finish_redrive(letter_id, delivered=True, reason=None, attempts=9, failed_at_us=1)
    await store.add_dead_letters([letter], None)
    await store.dead_letters("p", "stats")
    await store.add_gaps([GapRecord("p", "stats", 0, stream, token, SequenceToken(4), "old", 5)])
    await store.gaps("p")
    for value in ("v", None):
        await store.set_value("k", value)
    await store.value("k")
    for name in ("a", "b"):
        await store.add_token(TokenRecord(name, bytes(32), {"publish": ["*"]}, 1, name))
    await store.tokens()
    await store.delete_token("b")
