"""A silo as one of several that a supervisor keeps running (`headrace.silo.supervisor`), as a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import msgspec

from .commands.silo import FORMAT, serve
from .config import SiloConfig
from .host import Silo
from .outcome import exit_code, message
from .supervisor import Word

log = logging.getLogger("headrace.silo")


def main(words: int) -> int:
    """Serve what stdin says until a signal, or its end. `words` is the file descriptor for what is to be said."""
    os.set_inheritable(words, False)  # what handlers start would keep it open
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        return 1  # nobody is there to say why
    config = msgspec.json.decode(line, type=SiloConfig)
    assert config.cluster is not None
    name = FORMAT.replace("%(name)s", f"{config.cluster.name} %(name)s")
    logging.basicConfig(level=config.log_level.upper(), format=name)
    try:
        asyncio.run(_serve(config, words))
    except BaseException as error:
        code = exit_code(error)
        if code is None:
            raise
        _say(words, Word(error=message(error)))
        return code
    return 0


async def _serve(config: SiloConfig, words: int) -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, _gone, told)

    def ready(silo: Silo) -> None:
        _say(words, Word(address=silo.grpc_address or ""))

    await serve(config, told, ready)


def _gone(told: asyncio.Event) -> None:
    """The supervisor's end of stdin is closed: nothing else is ever said there."""
    asyncio.get_running_loop().remove_reader(0)
    log.warning("the supervisor is gone: this silo stops")
    told.set()


def _say(words: int, word: Word) -> None:
    try:
        os.write(words, msgspec.json.encode(word) + b"\n")
    except BrokenPipeError:
        pass  # the supervisor is gone


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
