"""The process of one silo that a supervisor keeps running: see `headrace.silo.supervisor`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import msgspec

from ..silo.config import SiloConfig
from ..silo.host import Silo
from ..silo.supervisor import WorkerStatus
from ..streams.errors import HeadraceError
from .log_format import log_to_stderr
from .outcome import exit_code, message
from .serving import serve

log = logging.getLogger("headrace.silo")


def main(reports: int) -> int:
    """Serve with the configuration from stdin, until a signal or the end of stdin. `reports` is the file descriptor for
    the worker's status."""
    os.set_inheritable(reports, False)  # processes that handlers start would keep it open
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        return 1  # the supervisor is gone already
    config = msgspec.json.decode(line, type=SiloConfig)
    name = config.cluster.name if config.cluster is not None else None
    log_to_stderr(config.log_level, name or "")
    try:
        asyncio.run(_serve(config, reports))
    except BaseException as error:
        code = exit_code(error)
        if code is None:
            raise
        _report(reports, _failure(error))
        return code
    return 0


def _failure(error: BaseException) -> WorkerStatus:
    """Report the option in a field of its own: the supervisor knows whether the file or a variable has set it."""
    if isinstance(error, HeadraceError) and error.option and not error.hint:
        return WorkerStatus(error=error.problem, option=error.option)
    return WorkerStatus(error=message(error))


async def _serve(config: SiloConfig, reports: int) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, _stop, stopping)

    def ready(silo: Silo) -> None:
        _report(reports, WorkerStatus(address=silo.grpc_address or ""))

    await serve(config, stopping, ready)


def _stop(stopping: asyncio.Event) -> None:
    """The supervisor closed its end of stdin, so it is gone: it writes nothing more to stdin."""
    asyncio.get_running_loop().remove_reader(0)
    log.warning("the supervisor is gone: this silo stops")
    stopping.set()


def _report(reports: int, status: WorkerStatus) -> None:
    try:
        os.write(reports, msgspec.json.encode(status) + b"\n")
    except BrokenPipeError:
        pass  # the supervisor is gone


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
