"""Runs silos for `headrace silo` and `headrace dev`, and for the workers of a supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..silo.config import SiloConfig
from ..silo.config_loader import load_config, named_source, unknown_variables
from ..silo.host import Silo
from ..silo.supervisor import WorkerSupervisor, configurations
from ..silo.tuning import share_heaps, tune_interpreter
from ..streams.background import first_of
from ..streams.errors import InvalidArgument
from ..streams.outcomes import DONE
from .commands.running import handle_signals
from .log_format import log_to_stderr
from .service_manager import ServiceManager

log = logging.getLogger("headrace.silo")


def run_silo(file: Path | None, flags: Mapping[str, Any]) -> int:
    """Run the silo, or the workers, that the file, the variables and the flags configure. Return the exit code."""
    loaded = load_config(file, os.environ, flags)
    log_to_stderr(loaded.log_level)
    for line in unknown_variables(os.environ):
        log.warning("%s", line)
    try:
        manager = ServiceManager(os.environ)
        if loaded.workers is not None:
            return asyncio.run(_supervise(configurations(loaded, loaded.workers), manager))
        asyncio.run(_serve_alone(loaded, manager))
    except InvalidArgument as error:
        raise named_source(error, file, os.environ) from None
    return DONE


async def serve(
    config: SiloConfig, stop_requested: asyncio.Event | None, ready: Callable[[Silo], object] = lambda _: None
) -> None:
    """Run a silo until a signal, or until `stop_requested` is set."""
    share_heaps()
    stop_requested = stop_requested or asyncio.Event()
    handle_signals(lambda _: stop_requested.set())
    async with Silo.opened(config) as silo:
        tune_interpreter()
        ready(silo)
        await first_of(stop_requested.wait(), silo.until_superseded(), name="headrace silo end")


async def _serve_alone(config: SiloConfig, manager: ServiceManager) -> None:
    async with manager.watched():
        await serve(config, None, lambda _: manager.ready())


async def _supervise(configs: Sequence[SiloConfig], manager: ServiceManager) -> int:
    supervisor = WorkerSupervisor(configs, manager.ready)
    handle_signals(lambda _: supervisor.stop(), supervisor.kill)
    async with manager.watched():
        return await supervisor.run()
