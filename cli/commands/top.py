"""`headrace top`."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, cast

import click

from ...streams.background import BackgroundTasks, end
from ...streams.errors import HeadraceError
from .help import SectionedCommand
from .options import NumberRange, ProviderPlace, SiloPlace, adapter_options, calling, given, opened, place_options
from .output import json_option, print_json
from .running import run

if TYPE_CHECKING:
    from io import TextIOWrapper

    from ..top.screen import TopScreen
    from ..top.sources import Content, ContentSource


SLOW_S = 3.0
"""The screen says so if an answer takes longer, in seconds."""


@click.command("top", cls=SectionedCommand)
@functools.partial(place_options, shown_default="all of a silo; default with --data")
@adapter_options
@click.option(
    "--interval", "interval_s", type=NumberRange(min=0.25, max=60.0), default=1.0, show_default=True,
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
            transport = await stack.enter_async_context(calling(place, patient=False))
            yield SiloSource(transport, place.provider if given("provider") else ""), place.address
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
    async with _source(place) as (source, where), BackgroundTasks() as background:
        screen = TopScreen(where, interval_s)
        shown = _Shown(source, await source.overview())
        console, loop = Console(highlight=False), asyncio.get_running_loop()
        with keys_of_terminal(pressed), Live(console=console, screen=True, auto_refresh=False) as live:
            began, refresh = loop.time(), None
            while not screen.quitting:
                note = shown.note if refresh is None else _slow(loop.time() - began) or shown.note
                lines = screen.draw(shown.content, shown.detail, console.width, console.height, note)
                live.update(Group(*lines), refresh=True)
                # A refresh may hang, so keys are read meanwhile.
                key = await _key(pressed, loop.time() + 1.0 if refresh is not None else began + screen.interval_s)
                target = screen.table, screen.target
                if key:
                    screen.press(key, shown.content)
                if (screen.table, screen.target) != target:
                    shown.detail = None
                    await end(refresh)
                elif key or (refresh is not None and not refresh.done()):
                    continue
                elif refresh is not None:
                    refresh.result()
                    refresh, began = None, loop.time()
                    continue
                began = loop.time()
                refresh = background.hold(shown.refresh(screen), "headrace top")
                refresh.add_done_callback(lambda _: pressed.put_nowait(""))


def _slow(waited_s: float) -> str:
    return f"no answer for {waited_s:.0f} s" if waited_s > SLOW_S else ""


async def _key(pressed: asyncio.Queue[str], until: float) -> str:
    """Return the next key; "" if there is none until this loop time, or if a refresh ended."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            return await pressed.get()
    return ""


class _Shown:
    """What is on the screen."""

    def __init__(self, source: ContentSource, content: Content) -> None:
        self._source = source
        self.content = content
        self.detail: Content | None = None
        self.note = ""
        """Why the content is not new."""

    async def refresh(self, screen: TopScreen) -> None:
        """Ask the source for the content of the screen. If that fails, the old content stays."""
        try:
            if not screen.frozen:
                self.content, self.note = await self._source.overview(), ""
            if screen.target is not None and (self.detail is None or not screen.frozen):
                self.detail = await _details(screen, self._source)
        except HeadraceError as error:
            self.note = str(error)


async def _details(screen: TopScreen, source: ContentSource) -> Content | None:
    if screen.target is None:
        return None
    provider, name = screen.target
    return await (
        source.queue(provider, int(name)) if screen.table == "queues" else source.subscription(provider, name)
    )
