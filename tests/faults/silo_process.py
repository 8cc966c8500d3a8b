"""A silo as a process of its own: started, watched from outside, killed, started again."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.cli.commandline import ENVIRONMENT, SCRIPT

READY = re.compile(r"silo is ready: .*; gRPC on (\S+):(\d+)\n")
PATIENCE_S = 60


class SiloProcess:
    """`flags` go to `headrace silo`, besides the data directory and the address. It keeps its port over restarts."""

    def __init__(self, directory: Path, *flags: str, wrapper: Sequence[str] = (), config: str = "") -> None:
        self.directory = directory
        self.address = "127.0.0.1:0"
        self._flags = flags
        self._wrapper = wrapper
        self._log = directory / "silo.log"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        if config:
            (directory / "silo.toml").write_text(config)
            self._flags = ("silo.toml", *flags)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """All that it said, over restarts."""
        return self._log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Return once it serves gRPC."""
        said = len(self.log) if self._log.exists() else 0
        self._begin()
        await self._until(lambda: READY.search(self.log, said) is not None or not self.running)
        match = READY.search(self.log, said)
        assert match is not None, self.log[said:]
        self.address = f"{match[1]}:{match[2]}"

    def _begin(self) -> None:
        command = [*self._wrapper, SCRIPT, "silo", *self._flags, "--data", "data", "--listen", self.address]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=self.directory, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    async def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        await self.ended()

    async def stop(self) -> None:
        """In order: SIGTERM."""
        self.signal(signal.SIGTERM)
        assert await self.ended() == 0, self.log

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self) -> int:
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait, PATIENCE_S)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.02)

    # ---- from outside ----------------------------------------------------------------------------------------------

    @property
    def memory(self) -> int:
        """Bytes of its own: without those of files, which the system takes back."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        match = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert match is not None
        return int(match[1]) << 10

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def clean_up(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@asynccontextmanager
async def silo_process(
    directory: Path, *flags: str, wrapper: Sequence[str] = (), config: str = ""
) -> AsyncGenerator[SiloProcess]:
    """A silo that serves, for the length of an `async with`. Whatever is left of it is killed."""
    silo = SiloProcess(directory, *flags, wrapper=wrapper, config=config)
    try:
        await silo.start()
        yield silo
    finally:
        silo.clean_up()
