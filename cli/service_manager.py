"""Tell systemd that the process is ready and alive, as sd_notify(3) says.

Nothing is sent if systemd did not ask for it with `Type=notify`, and `WatchdogSec=` for the second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import asynccontextmanager

from ..streams.background import BackgroundTasks

log = logging.getLogger("headrace.silo")


class ServiceManager:
    """The service manager that started this process."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Take its variables out of `environ`: processes that handlers start are not the service."""
        self._address = environ.pop("NOTIFY_SOCKET", "")
        watchdog_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", str(os.getpid()))
        self._watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdigit() and pid == str(os.getpid()) else 0.0

    def ready(self) -> None:
        """The service serves."""
        self._send("READY=1")

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        """Tell the service manager twice in each of its intervals that the event loop runs."""
        async with BackgroundTasks() as background:
            if self._watchdog_s:
                background.start(self._feed(), "headrace watchdog")
            yield

    async def _feed(self) -> None:
        while True:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(False)
            try:
                channel.sendto(message.encode(), address)
            except BlockingIOError:
                log.debug("%s is not sent: earlier messages wait", message)
            except OSError as error:  # the service goes on
                log.warning("%s could not be sent to %s: %s", message, self._address, error.strerror)
