"""`headrace publish FILE` after an interruption, when its progress and the queue come from different times: after a
restore. No line is missing, and no line is there twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace import Provider, StreamId
from headrace.cli.commands.journal import journal_key
from headrace.cli.commands.lines import LineFormat
from headrace.cli.commands.publish import LINES_AT_ONCE
from tests.cli.commandline import ENVIRONMENT, Headrace
from tests.client.silos import SiloProcess, stored

S = StreamId("n", "k")
BAD = b"bad\n"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(ENVIRONMENT, "XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "headrace"


def lines(count: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(count))


def events(data: Path) -> list[bytes]:
    return asyncio.run(stored(data)).get(S, [])


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def restore(headrace: Headrace, silo: SiloProcess, backup: str) -> None:
    silo.stop()
    silo.data.rename(silo.folder / "lost")
    assert headrace("restore", backup, "--data", silo.data).code == 0
    silo.start()


def test_lines_that_a_restored_silo_lost_are_published_again(headrace: Headrace, silo: SiloProcess, tmp_path: Path):
    file, publish = tmp_path / "f", ("publish", "--server", silo.address, "--stream", "n/k", "f")
    file.write_bytes(lines(3) + BAD)
    assert headrace(*publish).code == 1
    assert headrace("backup", "--data", silo.data, "b").code == 0
    last = 3 * LINES_AT_ONCE
    file.write_bytes(lines(last) + BAD)
    assert headrace(*publish).code == 1
    restore(headrace, silo, "b")

    file.write_bytes(lines(last + 1))
    ran = headrace(*publish)

    assert ran.code == 0, ran
    assert "f: continuing after line 3, the last one that the queue has: " in ran.err
    silo.stop()
    assert events(silo.data) == numbers(last + 1)


def test_a_silo_that_lost_all_lines_is_not_taken_for_one_that_has_them(
    headrace: Headrace, silo: SiloProcess, tmp_path: Path, state: Path
):
    file, publish = tmp_path / "f", ("publish", "--server", silo.address, "--stream", "n/k", "f")
    assert headrace("backup", "--data", silo.data, "b").code == 0
    for count in (3, 5):
        file.write_bytes(lines(count) + BAD)
        assert headrace(*publish).code == 1
    restore(headrace, silo, "b")

    file.write_bytes(lines(7))
    refused = headrace(*publish).refused(1)

    assert refused.startswith("f: an earlier run published the lines up to 3, perhaps 5, but the queue does not")
    assert refused.endswith("then publish the missing lines as another file")
    (progress,) = state.glob("*.json")
    progress.unlink()
    assert headrace(*publish).code == 0
    silo.stop()
    assert events(silo.data) == numbers(7)


@pytest.mark.parametrize("ending", [b"\n", b""])
def test_progress_that_is_older_than_the_queue_continues_after_the_lines_of_the_queue(
    headrace: Headrace, tmp_path: Path, ending: bytes
):
    file, publish = tmp_path / "f", ("publish", "--data", "d", "--stream", "n/k", "f")
    file.write_bytes(lines(2) + BAD)
    assert headrace(*publish).code == 1
    older = asyncio.run(progress_of(file))
    for count in (4, 6):
        file.write_bytes(lines(count) + BAD)
        assert headrace(*publish).code == 1
    assert asyncio.run(progress_of(file, older)) != older

    file.write_bytes(lines(9).removesuffix(b"\n") + ending)
    ran = headrace(*publish)

    assert ran.code == 0, ran
    assert "f: continuing after line 6, the last one that the queue has: " in ran.err
    assert events(tmp_path / "d") == numbers(9)


def test_a_file_without_the_lines_of_the_queue_is_published_whole(headrace: Headrace, tmp_path: Path):
    file, publish = tmp_path / "f", ("publish", "--data", "d", "--stream", "n/k", "f")
    file.write_bytes(lines(2) + BAD)
    assert headrace(*publish).code == 1
    older = asyncio.run(progress_of(file))
    file.write_bytes(lines(6) + BAD)
    assert headrace(*publish).code == 1
    asyncio.run(progress_of(file, older))

    file.write_bytes(lines(5))
    ran = headrace(*publish)

    assert ran.code == 0, ran
    assert "f: lines up to 6 have changed since an earlier run published them: publishing all lines" in ran.err
    assert events(tmp_path / "d") == numbers(6) + numbers(5)


async def progress_of(file: Path, replacement: str | None = None) -> str:
    """Return the stored progress of the file in the data directory beside it, and replace it."""
    key = f"publish/{journal_key('default', str(file), LineFormat(format='json', stream='n/k'))}"
    async with Provider.open(file.parent / "d") as provider:
        value = await provider.store.value(key)
        assert value is not None
        if replacement is not None:
            await provider.store.set_value(key, replacement)
    return value
