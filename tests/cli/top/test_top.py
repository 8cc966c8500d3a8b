"""`headrace top` in a terminal of 80 by 24, as docs/top.md shows it, and its output for programs."""

import asyncio
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyte
import pytest

from tests.faults.silo_process import silo_process
from tests.silo.dashboard.scene import DEAD, scene

PATIENCE_S = 60


class Terminal:
    """A terminal in which a command runs."""

    def __init__(self, command: list[str], columns: int = 80, lines: int = 24) -> None:
        self._screen: Any = pyte.Screen(columns, lines)
        self._stream: Any = pyte.ByteStream(self._screen)
        self._master, slave = pty.openpty()
        self.resize(columns, lines)
        environment = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        for name in ("COLUMNS", "LINES"):  # pytest-xdist sets them, and they override the terminal's size
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        asyncio.get_running_loop().add_reader(self._master, self._read)

    def _read(self) -> None:
        try:
            self._stream.feed(os.read(self._master, 65536))
        except OSError:  # the command has ended
            asyncio.get_running_loop().remove_reader(self._master)

    def resize(self, columns: int, lines: int) -> None:
        self._screen.resize(lines, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    async def until(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Return the lines of the screen once they fulfil the condition."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition(self.lines):  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail("the screen is\n" + "\n".join(self.lines))
        return self.lines

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)


@asynccontextmanager
async def watching(*arguments: str, columns: int = 80, lines: int = 24) -> AsyncGenerator[Terminal]:
    headrace = Path(sys.executable).with_name("headrace")
    terminal = Terminal([str(headrace), "top", *arguments], columns, lines)
    try:
        yield terminal
    finally:
        terminal.close()


def has(text: str) -> Callable[[list[str]], bool]:
    return lambda lines: any(text in line for line in lines)


@pytest.mark.long
async def test_a_silo_is_watched_sorted_filtered_and_looked_into(tmp_path: Path) -> None:
    async with scene(tmp_path) as found, watching("--server", found.silo.grpc_address or "") as terminal:
        lines = await terminal.until(has("report"))
        assert lines[0].startswith("headrace top  127.0.0.1:")
        assert "4/4 queues served" in lines[1]
        await terminal.until(has("subscription taxes is paused"))
        await terminal.until(has("bills"))
        terminal.press("/rep\r")
        await terminal.until(lambda lines: has("report")(lines) and not has("archive")(lines))
        terminal.press("\r")
        await terminal.until(has("subscription report"))
        await terminal.until(has("CONSUMER"))
        terminal.press("\x1b")
        await terminal.until(has("SUBSCRIPTION"))
        terminal.press("\x1b")
        await terminal.until(has("archive"))
        terminal.press("2")
        await terminal.until(has("default/3"))
        terminal.press("\r")
        await terminal.until(has("queue default/0"))
        await terminal.until(has("cache "))
        assert has("▲ archive")(terminal.lines) or has("◀ archive")(terminal.lines)
        terminal.press("3")
        await terminal.until(has("ADDRESS"))
        terminal.press("?")
        await terminal.until(has("freeze the screen"))
        terminal.press("x")
        terminal.press("p")
        await terminal.until(has("FROZEN"))
        terminal.resize(120, 30)
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.press("1")
        await terminal.until(lambda lines: len(lines) == 30 and "quit" in lines[-1])
        terminal.press("q")
        assert await terminal.ended() == 0


@pytest.mark.long
async def test_a_data_directory_is_watched_while_a_silo_serves_it(tmp_path: Path) -> None:
    async with scene(tmp_path), watching("--data", str(tmp_path)) as terminal:
        lines = await terminal.until(has("report"))
        assert lines[0].startswith("headrace top  ")
        await terminal.until(
            lambda lines: any(line.startswith("prices") and line.split()[4] not in "–0" for line in lines)
        )
        terminal.press("2")
        await terminal.until(lambda lines: any("default/0" in line and "stored" in line for line in lines))
        terminal.press("\r")
        await terminal.until(has("queue default/0"))
        await terminal.until(has("prices: at"))
        terminal.press("1/taxes\r\r")
        await terminal.until(has("1 blocked stream"))
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.ended() == 130


@pytest.mark.long
async def test_programs_get_json_and_pipes_get_one_screen(tmp_path: Path) -> None:
    async with scene(tmp_path) as found:
        for place in (["--server", found.silo.grpc_address or ""], ["--data", str(tmp_path)]):
            document = msgspec.json.decode(await printed("--json", *place))
            names = sorted(one["name"] for one in document["subscriptions"])
            assert names == ["archive", "bills", "mail", "prices", "report", "taxes"]
            assert len(document["queues"]) == 4
            assert {one["name"]: one["dead_letters"] for one in document["subscriptions"]}["mail"] == DEAD
            text = (await printed(*place)).decode()
            assert "SUBSCRIPTION" in text
            assert "! subscription taxes is paused: 1 stream paused until resumed" in text
            assert "default/3" in text


@pytest.mark.long
async def test_an_unknown_provider_is_an_error(tmp_path: Path) -> None:
    async with silo_process(tmp_path / "silo") as silo:
        status, _, error = await executed("--once", "--provider", "nope", "--server", silo.address)
        assert status == 1
        assert error == b"headrace: this silo has no provider 'nope': name one of its configuration\n"


async def test_an_interval_that_is_no_number_is_refused(tmp_path: Path) -> None:
    status, _, error = await executed("--interval", "nan", "--data", str(tmp_path))
    assert status == 2
    assert b"'nan' is not a number." in error


async def printed(*arguments: str) -> bytes:
    status, out, _ = await executed(*arguments)
    assert status == 0
    return out


async def executed(*arguments: str) -> tuple[int | None, bytes, bytes]:
    headrace = Path(sys.executable).with_name("headrace")
    process = await asyncio.create_subprocess_exec(
        headrace, "top", *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, error = await process.communicate()
    return process.returncode, out, error


@pytest.mark.long
async def test_a_silo_that_is_gone_is_one_line_and_the_screen_stays(tmp_path: Path) -> None:
    async with scene(tmp_path) as found:
        terminal = Terminal(
            [str(Path(sys.executable).with_name("headrace")), "top", "--server", found.silo.grpc_address or ""]
        )
        await terminal.until(has("report"))
    try:
        await terminal.until(lambda lines: any(line.startswith("! ") and "silo" in line for line in lines))
        assert has("report")(terminal.lines)
        terminal.press("q")
        assert await terminal.ended() == 0
    finally:
        terminal.close()


@pytest.mark.long
async def test_keys_work_while_a_silo_does_not_answer(tmp_path: Path) -> None:
    async with silo_process(tmp_path / "silo") as silo, watching("--server", silo.address) as terminal:
        await terminal.until(has("SUBSCRIPTION"))
        silo.signal(signal.SIGSTOP)
        await terminal.until(has("no answer for"))
        terminal.press("?")
        await terminal.until(lambda lines: not has("SUBSCRIPTION")(lines))
        terminal.press("?")
        await terminal.until(has("SUBSCRIPTION"))
        silo.signal(signal.SIGCONT)
        await terminal.until(lambda lines: not has("no answer for")(lines))
        silo.signal(signal.SIGSTOP)
        await terminal.until(has("no answer for"))
        terminal.press("q")
        assert await terminal.ended() == 0
