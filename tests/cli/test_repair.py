"""A log or a control store that is lost: refused everywhere, and the way back."""

import asyncio
import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from pathlib import Path
from threading import Barrier

import pytest

from headrace import (
    Busy,
    DataDirectoryError,
    Event,
    InvalidArgument,
    NotFound,
    Selector,
    SubscriptionDefinition,
)
from headrace.adapters.log import LogScan
from headrace.silo.provider import Provider
from headrace.silo.repair import RenewedControl, control_store, renew_control, renew_log, skip_damage
from headrace.store.datadir import open_data_directory
from headrace.streams.subscriptions import Checkpoint
from tests.cli.commandline import Headrace


async def ignore(_: Event) -> None:
    pass


async def make(data: Path) -> None:
    """Three events in one queue, of which subscription `one` has done two."""
    async with Provider.open(data, queues=1) as provider:
        await provider.stream("orders", "42").publish(b"1")
        await provider.stream("orders", "42").publish(b"2")
        subscription = await provider.subscribe("one", "orders/*", ignore, start="earliest")
        await subscription.caught_up()
        await provider.withdraw("one")
        await provider.stream("orders", "42").publish(b"3")


def delete(log: Path) -> None:
    shutil.rmtree(log)


def delete_file(log: Path) -> None:
    (log / "data.mdb").unlink()


def empty(log: Path) -> None:
    (log / "data.mdb").write_bytes(b"")


def delete_provider(log: Path) -> None:
    shutil.rmtree(log.parent)


def lose_control(data: Path, content: bytes | None) -> None:
    for file in data.glob("control.db*"):
        file.unlink()
    if content is not None:
        (data / "control.db").write_bytes(content)


def log_of(data: Path) -> Path:
    return data / "providers" / "default" / "log"


@pytest.mark.parametrize("lose", [delete, delete_file, empty, delete_provider])
async def test_a_lost_log_is_refused_until_it_is_begun_anew(tmp_path: Path, lose: object):
    await make(tmp_path)
    assert callable(lose)
    lose(log_of(tmp_path))

    for _ in range(2):
        with pytest.raises(DataDirectoryError, match=r"log of provider 'default' was deleted or emptied: restore it"):
            async with Provider.open(tmp_path):
                pass
    (first,) = (await renew_log(tmp_path, "default")).values()

    got: list[bytes] = []

    async def handler(event: Event) -> None:
        got.append(event.payload)

    for payload in (b"4", b"5"):
        async with Provider.open(tmp_path) as provider:
            token = await provider.stream("orders", "42").publish(payload)
            subscription = await provider.subscribe("one", "orders/*", handler, start="earliest")
            await subscription.caught_up()
            (gap,) = await provider.store.gaps("default")
    assert got == [b"4", b"5"]
    assert first > 3  # no offset of the lost log means another batch now
    assert token == (first + 1, 0)
    assert (gap.low, gap.high, gap.reason) == ((2, 0), (first, 0), "the log was lost, and begun anew")


@pytest.mark.parametrize(("selector", "queues"), [("orders/*", 2), ("orders/42", 1)])
async def test_a_log_is_begun_anew_although_a_checkpoint_is_damaged(tmp_path: Path, selector: str, queues: int):
    got: list[bytes] = []

    async def handler(event: Event) -> None:
        got.append(event.payload)

    async with Provider.open(tmp_path, queues=2) as provider:
        await provider.stream("orders", "42").publish([b"1", b"2"])
        await (await provider.subscribe("one", selector, handler, start="earliest")).caught_up()
    delete(log_of(tmp_path))
    with closing(sqlite3.connect(tmp_path / "control.db")) as database, database:
        assert database.execute("UPDATE checkpoints SET next_offset = next_offset + 7").rowcount == queues
    starts = await renew_log(tmp_path, "default")
    async with Provider.open(tmp_path) as provider:
        await provider.stream("orders", "42").publish(b"3")
        await (await provider.subscribe("one", selector, handler, start="earliest")).caught_up()
        gaps = await provider.store.gaps("default")
        assert await provider.store.damaged_rows() == []
    assert got == [b"1", b"2", b"3"]
    assert len(gaps) == queues
    assert {(gap.low, gap.high) for gap in gaps} == {((0, 0), (starts[gap.queue], 0)) for gap in gaps}


@pytest.mark.parametrize("subscribed", [False, True])
async def test_offsets_of_a_new_log_are_not_used_again_if_it_is_lost_too(tmp_path: Path, subscribed: bool):
    async def published() -> int:
        async with Provider.open(tmp_path, queues=1) as provider:
            return (await provider.stream("orders", "42").publish(b"1")).offset

    last = await published()
    if subscribed:
        definition = SubscriptionDefinition(name="slow", selector=Selector("orders/*"))
        async with control_store(tmp_path, None) as (_, store):
            await store.create_subscription("default", definition, {0: Checkpoint(0)})
    for _ in range(2):
        shutil.rmtree(log_of(tmp_path))
        starts = await renew_log(tmp_path, "default")
        assert starts[0] > last
        last = await published()
        assert last == starts[0]


async def test_a_log_that_is_there_is_not_begun_anew(tmp_path: Path):
    await make(tmp_path)
    with pytest.raises(InvalidArgument, match="has a log, so no new one is made"):
        await renew_log(tmp_path, "default")
    with pytest.raises(NotFound, match="does not know a provider 'other'"):
        await renew_log(tmp_path, "other")
    async with Provider.open(tmp_path) as provider:
        assert (await provider.adapter.bounds(0)).next == 3


async def test_a_log_is_not_begun_anew_while_a_process_serves_a_subscription(tmp_path: Path):
    await make(tmp_path)
    async with Provider.open(tmp_path) as provider:
        await provider.subscribe("one", "orders/*", ignore, start="earliest")
        delete(log_of(tmp_path))
        with pytest.raises(Busy, match="subscription 'one' of provider 'default' is served by process"):
            await renew_log(tmp_path, "default")
    assert not log_of(tmp_path).exists()


async def test_beginning_a_log_anew_can_be_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    await make(tmp_path)
    delete(log_of(tmp_path))

    def fail(_: Path, __: Path) -> None:
        raise OSError("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="interrupted"):
            await renew_log(tmp_path, "default")
    with pytest.raises(DataDirectoryError, match="was deleted or emptied"):
        async with Provider.open(tmp_path):
            pass
    await renew_log(tmp_path, "default")
    async with Provider.open(tmp_path) as provider:
        await provider.stream("orders", "42").publish(b"4")


async def test_the_log_of_another_data_directory_or_an_older_one_is_refused(tmp_path: Path):
    ours, other = tmp_path / "ours", tmp_path / "other"
    await make(ours)
    await make(other)
    log_of(ours).rename(tmp_path / "older")
    shutil.copytree(log_of(other), log_of(ours))
    with pytest.raises(DataDirectoryError, match="from another data directory, or older: put back the right one"):
        async with Provider.open(ours):
            pass

    delete(log_of(ours))
    await renew_log(ours, "default")
    delete(log_of(ours))
    (tmp_path / "older").rename(log_of(ours))
    with pytest.raises(DataDirectoryError, match="from another data directory, or older: put back the right one"):
        async with Provider.open(ours):
            pass


@pytest.mark.parametrize("content", [None, b""])
async def test_a_lost_control_store_is_made_anew_from_the_log(tmp_path: Path, content: bytes | None):
    await make(tmp_path)
    lose_control(tmp_path, content)
    with pytest.raises(DataDirectoryError, match=r"control\.db is missing or empty: restore it from a backup, or make"):
        async with Provider.open(tmp_path):
            pass

    assert await renew_control(tmp_path) == RenewedControl(["default"], None)

    got: list[bytes] = []

    async def handler(event: Event) -> None:
        got.append(event.payload)

    async with Provider.open(tmp_path) as provider:
        assert provider.queues == 1
        assert await provider.store.subscriptions("default") == []
        subscription = await provider.subscribe("one", "orders/*", handler, start="earliest")
        await subscription.caught_up()
    assert got == [b"1", b"2", b"3"]
    with pytest.raises(InvalidArgument, match="knows the provider of each log: there is nothing to make anew"):
        await renew_control(tmp_path)


NO_LOG = "control.db is missing or empty, and there is no log: check the directory's name, or restore it from a backup"


def entries(data: Path) -> list[str]:
    """All files and directories, without locks: taking one creates its file."""
    return sorted(str(each.relative_to(data)) for each in data.rglob("*") if "locks" not in each.parts)


@pytest.mark.parametrize("lose", [delete, delete_provider])
async def test_a_lost_control_store_is_not_made_anew_without_a_log(tmp_path: Path, lose: Callable[[Path], None]):
    """Else the loss would be hidden: the next publish would make a new log. Queues in a database have no log."""
    await make(tmp_path)
    lose(log_of(tmp_path))
    with pytest.raises(InvalidArgument, match="it has no log: there is nothing to make anew"):
        await renew_control(tmp_path)
    lose_control(tmp_path, None)
    before = entries(tmp_path)
    for repair in (renew_control(tmp_path), renew_log(tmp_path, "default"), renew_control(tmp_path)):
        with pytest.raises(DataDirectoryError, match=NO_LOG):
            await repair
    assert entries(tmp_path) == before


async def test_a_control_store_is_not_made_for_a_log_that_cannot_be_read(tmp_path: Path):
    await make(tmp_path)
    lose_control(tmp_path, None)
    (tmp_path / "providers" / "default").rename(tmp_path / "providers" / "other")
    before = entries(tmp_path)
    with pytest.raises(DataDirectoryError, match="its log belongs to a provider 'default': rename the directory"):
        await renew_control(tmp_path)
    assert entries(tmp_path) == before


async def test_a_provider_that_is_not_there_makes_no_control_store(tmp_path: Path):
    await asyncio.to_thread(open_data_directory, tmp_path)
    with pytest.raises(NotFound, match="has no provider 'default': there is none"):
        await skip_damage(tmp_path, "default", 0)
    assert entries(tmp_path) == ["headrace.json"]


async def test_a_control_store_is_not_made_anew_while_a_process_serves_a_subscription(tmp_path: Path):
    data = tmp_path / "data"
    await make(data)
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(Provider.open(data))
        await provider.subscribe("one", "orders/*", ignore, start="earliest")
        lose_control(data, None)
        with pytest.raises(Busy, match=r"is used, see locks/default/one\.lock, by process \d+: stop that one first"):
            await renew_control(data)
        assert not (data / "control.db").exists()
        with pytest.raises(DataDirectoryError, match="deleted or replaced"):  # the last progress is lost
            await stack.aclose()
    assert await renew_control(data) == RenewedControl(["default"], None)


async def test_a_process_that_has_a_lost_control_store_open_saves_nothing_beside_the_new_one(tmp_path: Path):
    data = tmp_path / "data"
    await make(data)
    async with Provider.open(data) as provider:  # without a subscription, so that it holds no lock
        lose_control(data, None)
        assert await renew_control(data) == RenewedControl(["default"], None)
        with pytest.raises(DataDirectoryError, match="deleted or replaced"):
            await provider.subscribe("two", "orders/*", ignore)


async def test_a_damaged_write_ahead_log_is_refused_until_its_end_is_given_up(tmp_path: Path, headrace: Headrace):
    killed = tmp_path / "killed"
    names = ["first", "second", "third"]
    async with Provider.open(tmp_path / "data", queues=1) as provider:
        for name in names:
            await provider.create_subscription(SubscriptionDefinition(name=name, selector=Selector("orders/*")))
        shutil.copytree(tmp_path / "data", killed, ignore=shutil.ignore_patterns("wake"))
    log = killed / "control.db-wal"
    content = bytearray(log.read_bytes())
    content[content.index(b"second")] ^= 1
    log.write_bytes(content)
    damage = r"control\.db-wal: the checksum of frame \d+ of \d+ does not match, so data that was saved last cannot be"
    for _ in range(2):
        with pytest.raises(DataDirectoryError, match=f"{damage} read: restore it from a backup, or continue with .*`"):
            async with Provider.open(killed):
                pass
    checked = headrace("check", "--data", killed)
    assert checked.code == 1
    assert re.search(f"^damaged: control.db: {damage} read: .*`headrace repair control --data ", checked.out)
    assert log.read_bytes() == content

    assert re.search(f"{damage} read: the control store has", headrace("repair", "control", "--data", killed).err)

    assert headrace("check", "--data", killed).code == 0
    async with Provider.open(killed) as provider:
        assert [one.name for one in await provider.subscriptions()] == names[:1]
    with pytest.raises(InvalidArgument, match="there is nothing to make anew"):
        await renew_control(killed)


async def test_a_control_store_that_has_forgotten_everything_is_refused(tmp_path: Path):
    """As SQLite leaves it if its write-ahead log is lost."""
    await make(tmp_path)
    async with Provider.open(tmp_path / "new", queues=1, adapter="memory", name="other"):
        pass
    (tmp_path / "new" / "control.db").replace(tmp_path / "control.db")
    with pytest.raises(DataDirectoryError, match="has events, but its control store does not know it"):
        async with Provider.open(tmp_path, queues=1):
            pass
    assert await renew_control(tmp_path) == RenewedControl(["default"], None)
    async with Provider.open(tmp_path) as provider:
        assert provider.queues == 1


async def test_a_log_goes_on_with_its_control_data_in_a_database(tmp_path: Path, postgres_url: str):
    from headrace.silo.options import ProviderOptions  # noqa: PLC0415

    async def published() -> int:
        options = ProviderOptions(queues=1)
        provider = await Provider.start(tmp_path, options, control=postgres_url, leased=True)
        try:
            return (await provider.stream("orders", "42").publish(b"1")).offset
        finally:
            await provider.aclose()

    assert await published() == 0
    delete(log_of(tmp_path))
    with pytest.raises(DataDirectoryError, match="was deleted or emptied"):
        await published()
    starts = await renew_log(tmp_path, "default", postgres_url)
    assert await published() == starts[0]


@pytest.mark.parametrize("what", [("log",), ("control",), ("queue", 0)])
def test_a_mistyped_directory_is_not_made(tmp_path: Path, headrace: Headrace, what: tuple[object, ...]):
    line = headrace("repair", *what, "--data", tmp_path / "dota").refused(1)
    assert line.endswith("is no data directory: it has no headrace.json; check its name")
    assert not (tmp_path / "dota").exists()


def test_commands_refuse_a_lost_log_and_bring_it_back(tmp_path: Path, headrace: Headrace):
    data = ("--data", tmp_path / "data")
    headrace("publish", *data, "--queues", 1, "--stream", "orders/42", stdin=b"1\n2\n")
    delete_provider(log_of(tmp_path / "data"))
    for command in (
        ("publish", *data, "--stream", "orders/42"), ("subscribe", *data, "--no-follow", "orders/*"), ("queues", *data),
         ("streams", *data), ("subscriptions", "list", *data),
    ):  # fmt: skip
        line = headrace(*command, stdin=b"3\n").refused(1)
        assert "the log of provider 'default' was deleted or emptied" in line
        assert line.endswith(
            f"or begin a new one with `headrace repair log --data {tmp_path / 'data'} --provider default`"
        )

    assert headrace("repair", "log", *data).err == "headrace: provider 'default' has a new, empty log with 1 queue\n"
    headrace("publish", *data, "--stream", "orders/42", stdin=b"3\n")
    printed = headrace("subscribe", *data, "--from", "earliest", "--no-follow", "--format", "raw", "orders/*")
    assert (printed.code, printed.out) == (0, "3\n")

    lose_control(tmp_path / "data", None)
    assert f"make a new one from the logs with `headrace repair control --data {tmp_path / 'data'}`" in headrace(
        "queues", *data
    ).refused(1)
    assert headrace("repair", "control", *data, "--json").json == {"providers": ["default"], "damage": None}
    printed = headrace("subscribe", *data, "--from", "earliest", "--no-follow", "--format", "raw", "orders/*")
    assert (printed.code, printed.out) == (0, "3\n")


def test_threads_that_make_one_provider_at_once_share_it(tmp_path: Path):
    import asyncio  # noqa: PLC0415

    together = Barrier(4)

    async def publish(number: int) -> None:
        async with Provider.open(tmp_path, queues=2) as provider:
            await provider.stream("orders", str(number)).publish(b"x")

    def in_thread(number: int) -> None:
        together.wait()
        asyncio.run(publish(number))

    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(in_thread, number) for number in range(4)]:
            each.result()
    with LogScan(log_of(tmp_path).parent) as scan:
        assert sum(tail.events for _, tail in scan.tails()) == 4
    assert json.loads((tmp_path / "headrace.json").read_text()) == {"format": 1}
