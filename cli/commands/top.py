"""`headrace top`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, cast

import click

from ...streams.errors import HeadraceError
from .help import SectionedCommand
from .options import ProviderPlace, SiloPlace, adapter_options, calling, opened, place_options, typed
from .output import json_option, print_json
from .running import run

if TYPE_CHECKING:
    from io import TextIOWrapper

    from ..top.screen import TopScreen
    from ..top.sources import Content, ContentSource


@click.command("top", cls=SectionedCommand)
@place_options
@adapter_options
@click.option(
    "--interval", "interval_s", type=click.FloatRange(min=0.25, max=60.0), default=1.0, show_default=True,
    metavar="SECONDS", help="Time between two refreshes.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Print one screen, and end. Default without a terminal.")
@json_option
def command(*, place: ProviderPlace, interval_s: float, once: bool, as_json: bool) -> None:
    """Watch queues and subscriptions on one screen: what is late, what is stuck, and why. Press ? for the keys.

    With --server, any silo answers for its cluster. With --data, queues and stored progress are read from the data
    directory; the processes that serve them are not asked, so states, retries and consumers are not known.
    """
    cast("TextIOWrapper", sys.stdout).reconfigure(errors="replace")  # a terminal without UTF-8 shows ? for bars
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and not (once or as_json)
    run(_watch(place, interval_s) if interactive else _print_once(place, as_json=as_json))


@asynccontextmanager
async def _source(place: ProviderPlace) -> AsyncGenerator[tuple[ContentSource, str]]:
    """Open the source of the content, and name it."""
    from ..top.sources import DataSource, SiloSource  # noqa: PLC0415 (it loads grpc)

    async with AsyncExitStack() as stack:
        if isinstance(place, SiloPlace):
            transport = await stack.enter_async_context(calling(place))
            yield SiloSource(transport, place.provider if typed("provider") else ""), place.address
        else:
            provider = await stack.enter_async_context(opened(place))
            yield DataSource(provider), str(place.data)


async def _print_once(place: ProviderPlace, *, as_json: bool) -> None:
    async with _source(place) as (source, where):
        content = await source.overview()
    if as_json:
        print_json(content)
        return
    from rich.console import Console  # noqa: PLC0415 (only where it is printed)

    from ..top.screen import TopScreen  # noqa: PLC0415

    console = Console(highlight=False)
    console.print(*TopScreen(where).page(content, console.width), sep="\n")


async def _watch(place: ProviderPlace, interval_s: float) -> None:
    from rich.console import Console, Group  # noqa: PLC0415 (only where there is a terminal)
    from rich.live import Live  # noqa: PLC0415

    from ..top.screen import TopScreen  # noqa: PLC0415
    from ..top.terminal import keys_of_terminal  # noqa: PLC0415

    pressed: asyncio.Queue[str] = asyncio.Queue()
    async with _source(place) as (source, where):
        screen = TopScreen(where, interval_s)
        content, note = await source.overview(), ""
        detail: Content | None = None
        console = Console(highlight=False)
        with keys_of_terminal(pressed), Live(console=console, screen=True, auto_refresh=False) as live:
            refreshed = asyncio.get_running_loop().time()
            while not screen.quitting:
                lines = screen.draw(content, detail, console.width, console.height, note)
                live.update(Group(*lines), refresh=True)
                before = screen.table, screen.target
                if (key := await _key(pressed, refreshed + screen.interval_s)) is not None:
                    screen.press(key, content)
                    if (screen.table, screen.target) == before:
                        continue
                    detail = None
                try:
                    if not screen.frozen:
                        content, note = await source.overview(), ""
                    if screen.target is not None and (detail is None or not screen.frozen):
                        detail = await _details(screen, source)
                except HeadraceError as error:  # shown until an attempt succeeds
                    note = str(error)
                refreshed = asyncio.get_running_loop().time()


async def _key(pressed: asyncio.Queue[str], until: float) -> str | None:
    """Return the next key; None if there is none until this loop time."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            return await pressed.get()
    return None


async def _details(screen: TopScreen, source: ContentSource) -> Content | None:
    if screen.target is None:
        return None
    provider, name = screen.target
    return await (
        source.queue(provider, int(name)) if screen.table == "queues" else source.subscription(provider, name)
    )
