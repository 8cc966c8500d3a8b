"""Context managers that block, used from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TypeVar

_T = TypeVar("_T")


@asynccontextmanager
async def in_threads(manager: AbstractContextManager[_T]) -> AsyncGenerator[_T]:
    """Enter and leave a context manager in a thread, because its beginning and end block."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    except BaseException as error:
        manager.__exit__(type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(manager.__exit__, None, None, None)
