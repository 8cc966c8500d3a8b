"""`headrace subscribe`."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ...streams import (
    Busy,
    Event,
    EventBatch,
    NotFound,
    PermissionDenied,
    Selector,
    Start,
    SubscriptionDefinition,
)
from ...streams.handlers import Declared
from ...streams.subscriptions import EPHEMERAL
from ..outcome import DONE
from ..provider import Provider, Subscription
from .following import print_from
from .options import (
    START_HELP,
    Place,
    Server,
    Where,
    check_how,
    connected,
    creation_options,
    opened,
    parse_start,
    place_options,
)
from .rendering import Format, all_of, parse_filter, renderer
from .running import run
from .writing import Writer

if TYPE_CHECKING:
    from ...streams.client import Client

DRAIN_S = 2.0


@click.command("subscribe")
@place_options
@creation_options
@click.option("--name", help="Keep the progress under this name.  [default: none is kept]")
@click.option("--from", "start", metavar="START", help=f"{START_HELP}  [default: latest]")
@click.option("--max", "limit", type=click.IntRange(min=1), metavar="N", help="Stop after N events.")
@click.option("--follow/--no-follow", default=True, show_default=True, help="Wait for more, or stop when caught up.")
@click.option("--filter", "filters", multiple=True, metavar="FILTER", help="header:NAME=VALUE or field:NAME=VALUE.")
@click.option("--format", "format_", type=click.Choice(["text", "raw", "json"]), default="text", show_default=True)
@click.option("--json", "format_", flag_value="json", help="Print one JSON document a line.")
@click.argument("selector")
def command(
    *,
    place: Place,
    how: dict[str, Any],
    name: str | None,
    start: str | None,
    limit: int | None,
    follow: bool,
    filters: Sequence[str],
    format_: Format,
    selector: str,
) -> None:
    """Print the events that SELECTOR selects: namespace/key, where * stands for any text.

    With --name the subscription is durable: an event counts as done once its line is written, and the next run with
    that name goes on after it. Without, it starts at --from and is forgotten at the end. Several filters all have to
    let an event pass.

    On a data directory, the provider has to exist: only with --adapter it is made. Of a silo, several commands with the
    same name share the events; filters are applied here.
    """
    check_how(place, how)
    wanted = Wanted(name, Selector(selector), None if start is None else parse_start(start), filters)
    wanted.definition(wanted.start)  # what is wrong with it is said before anything is opened
    printing = (
        _subscribe_to_silo(place, wanted, format_, limit, follow=follow)
        if isinstance(place, Server)
        else _subscribe(place, how, wanted, format_, limit, follow=follow)
    )
    run(printing, terminated=DONE)


class Wanted(NamedTuple):
    """The subscription that is asked for."""

    name: str | None
    selector: Selector
    start: Start | None
    filters: Sequence[str]

    async def at(self, provider: Provider) -> SubscriptionDefinition:
        """As it is to be. One that exists keeps its start unless another is asked for, which is an error."""
        start = self.start
        if self.name is not None and start is None:
            with suppress(NotFound):
                start = (await provider.store.subscription(provider.name, self.name)).start
        return self.definition(start)

    async def of(self, client: Client) -> SubscriptionDefinition:
        """The same on a silo, which has no filter: the events are filtered here."""
        start = self.start
        if self.name is not None and start is None:
            with suppress(NotFound, PermissionDenied):  # who may not know of it is told so when subscribing
                start = (await client.subscription(self.name)).definition.start
        return self._replace(filters=()).definition(start)

    def definition(self, start: Start | None) -> SubscriptionDefinition:
        return SubscriptionDefinition(
            name=self.name or f"{EPHEMERAL}{uuid.uuid4().hex[:12]}",
            selector=self.selector,
            start=start or Start.latest(),
            filter=" and ".join(self.filters) or None,
        )


class Enough(Exception):
    """No more is printed: the event at hand stays undone."""


class Printer:
    """Prints what it consumes. `ended` is done when there is no more to do, or with the error that made it stop."""

    def __init__(self, render: Callable[[Event], bytes]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._render = render
        self._writer = Writer(sys.stdout.fileno())

    def close(self) -> None:
        """Let go of the events that are not to be printed."""
        self._closing.set()

    async def on_error(self, error: Exception) -> None:
        """Somebody else has moved or taken the subscription."""
        if not self.ended.done():
            self.ended.set_exception(error)

    async def _print(self, events: Sequence[Event]) -> None:
        try:
            await self._writer.write(b"".join(map(self._render, events)))
        except Exception as error:  # noqa: BLE001 (what cannot be printed is no failure of the event: nothing is given up)
            await self.on_error(error)
            await self._enough()

    async def _enough(self) -> None:
        """Hold the event at hand until the end: given back before, it would be tried again and given up on."""
        await self._closing.wait()
        raise Enough


class BatchPrinter(Printer):
    """Prints every event, a batch at a time."""

    async def on_next_batch(self, batch: EventBatch) -> None:
        await self._print(batch.events())


class LimitedPrinter(Printer):
    """Prints so many events, one at a time, and leaves the others undone."""

    def __init__(self, render: Callable[[Event], bytes], limit: int) -> None:
        super().__init__(render)
        self._to_start = self._to_finish = limit

    async def on_next(self, event: Event) -> None:
        if not self._to_start:
            await self._enough()
        self._to_start -= 1
        await self._print([event])
        self._to_finish -= 1
        if not self._to_finish:
            self.ended.set_result(None)


async def _subscribe(
    where: Where, how: Mapping[str, Any], wanted: Wanted, format_: Format, limit: int | None, *, follow: bool
) -> None:
    render = renderer(format_)
    predicate = all_of([parse_filter(text) for text in wanted.filters])
    async with opened(where, how, create=how["adapter"] is not None) as provider:
        await _forget_left_behind(provider)
        printer = BatchPrinter(render) if limit is None else LimitedPrinter(render, limit)
        definition = await wanted.at(provider)
        subscription = await provider.attach(Declared(provider.name, definition, printer, False, predicate, 1000))
        try:
            await _until_end(printer, subscription, follow=follow)
        finally:
            printer.close()
            await _withdraw(provider, definition.name)
            if wanted.name is None:
                await _forget(provider, definition.name)


async def _subscribe_to_silo(
    server: Server, wanted: Wanted, format_: Format, limit: int | None, *, follow: bool
) -> None:
    passes = all_of([parse_filter(text) for text in wanted.filters])
    async with connected(server) as client:
        definition = await wanted.of(client)
        await print_from(client, definition, renderer(format_), passes, limit, follow=follow)


async def _withdraw(provider: Provider, name: str) -> None:
    with suppress(NotFound):  # somebody else took it
        await provider.withdraw(name, DRAIN_S)


async def _until_end(printer: Printer, subscription: Subscription, *, follow: bool) -> None:
    if follow:
        await printer.ended
        return
    caught_up = asyncio.create_task(subscription.caught_up(), name="headrace subscribe caught up")
    try:
        await asyncio.wait((caught_up, printer.ended), return_when=asyncio.FIRST_COMPLETED)
        await (printer.ended if printer.ended.done() else caught_up)
    finally:
        caught_up.cancel()
        await asyncio.gather(caught_up, return_exceptions=True)


async def _forget_left_behind(provider: Provider) -> None:
    """Delete what killed processes left: nobody will ever finish it, and it would keep events from being deleted."""
    for definition in await provider.store.subscriptions(provider.name):
        if definition.name.startswith(EPHEMERAL):
            await _forget(provider, definition.name)


async def _forget(provider: Provider, name: str) -> None:
    with suppress(Busy, NotFound):
        await provider.delete_subscription(name)
