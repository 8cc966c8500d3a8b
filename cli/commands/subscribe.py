"""`headrace subscribe`."""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ...streams.background import end
from ...streams.errors import Busy, CorruptRecord, NotFound, PermissionDenied
from ...streams.events import Event, EventBatch
from ...streams.identity import StreamId
from ...streams.outcomes import DONE
from ...streams.subscriptions import EPHEMERAL, Selector, Start, SubscriptionDefinition, check_subscription_name
from .following import print_from
from .help import SectionedCommand
from .options import (
    START_HELP,
    DataPlace,
    ProviderPlace,
    SiloPlace,
    check_how,
    connected,
    creation_options,
    opened,
    parse_start,
    place_options,
)
from .rendering import Format, Render, all_of, parse_filter, renderer
from .running import run
from .writing import ThreadedWriter

if TYPE_CHECKING:
    from ...client.client import Client
    from ...silo.provider import LocalSubscription, Provider

DRAIN_S = 2.0


@click.command("subscribe", cls=SectionedCommand)
@place_options
@creation_options
@click.option("--name", help="Save the progress under this name.  [default: not saved]")
@click.option("--from", "start", metavar="START", help=f"{START_HELP}  [default: latest]")
@click.option("--max", "limit", type=click.IntRange(min=1), metavar="N", help="Stop after N events.")
@click.option("--follow/--no-follow", default=True, show_default=True, help="Wait for more, or stop when caught up.")
@click.option("--filter", "filters", multiple=True, metavar="FILTER", help="header:NAME=VALUE or field:NAME=VALUE.")
@click.option("--format", "format_", type=click.Choice(["text", "raw", "json"]), default="text", show_default=True)
@click.option("--json", "format_", flag_value="json", help="Print one JSON document per line.")
@click.argument("selector")
def command(
    *,
    place: ProviderPlace,
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

    With --name the subscription is durable: an event is done once its line is written, and the next run with that name
    continues after it. Without --name the subscription starts at --from, and is deleted at the end. An event is printed
    if it passes all filters.

    In a data directory the provider has to exist; --adapter creates it. On a silo, several commands with the same name
    share the events, and the command applies the filters.
    """
    check_how(place, how)
    wanted = SubscribeOptions(name, Selector(selector), None if start is None else parse_start(start), filters)
    wanted.definition(wanted.start)  # raises for wrong options before anything is opened
    printing = (
        _subscribe_to_silo(place, wanted, format_, limit, follow=follow)
        if isinstance(place, SiloPlace)
        else _subscribe(place, how, wanted, format_, limit, follow=follow)
    )
    run(printing, terminated=DONE)


class SubscribeOptions(NamedTuple):
    """The subscription that the options describe."""

    name: str | None
    selector: Selector
    start: Start | None
    filters: Sequence[str]

    async def at(self, provider: Provider) -> SubscriptionDefinition:
        """Return its definition. A subscription that exists keeps its start: another --from is an error."""
        start = self.start
        if self.name is not None and start is None:
            with suppress(NotFound):
                start = (await provider.store.subscription(provider.name, self.name)).start
        return self.definition(start)

    async def of(self, client: Client) -> SubscriptionDefinition:
        """Return its definition on a silo, without filters: the command itself applies them."""
        start = self.start
        if self.name is not None and start is None:
            with suppress(NotFound, PermissionDenied):  # subscribing raises if the caller may not see it
                start = (await client.subscription(self.name)).definition.start
        return self._replace(filters=()).definition(start)

    def definition(self, start: Start | None) -> SubscriptionDefinition:
        name = f"{EPHEMERAL}{uuid.uuid4().hex[:12]}" if self.name is None else self.name
        return SubscriptionDefinition(
            name=check_subscription_name(name),
            selector=self.selector,
            start=start or Start.latest(),
            filter=" and ".join(self.filters) or None,
        )


class LimitReached(Exception):
    """The limit of printed events is reached: the current event stays unfinished."""


def _is_no_limit(record: logging.LogRecord) -> bool:
    """`LimitReached` is not a failure, so it is not logged."""
    return record.exc_info is None or not isinstance(record.exc_info[1], LimitReached)


def _is_not_damage(record: logging.LogRecord) -> bool:
    """With --no-follow the command ends with the damage as its error, so the damage is not logged in addition."""
    return not any(isinstance(value, CorruptRecord) for value in record.args or ())


class EventPrinter:
    """Prints the events that it consumes. `ended` is done at the limit, or has the error that stopped it."""

    def __init__(self, render: Render, queue_of: Callable[[StreamId], int]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._render = render
        self._queue_of = queue_of
        self._writer = ThreadedWriter(sys.stdout.fileno())

    def close(self) -> None:
        """Give back the events that are not printed."""
        self._closing.set()

    async def on_error(self, error: Exception) -> None:
        """Another process has moved or taken the subscription."""
        if not self.ended.done():
            self.ended.set_exception(error)

    async def _print(self, events: Sequence[Event]) -> None:
        try:
            await self._writer.write(b"".join(map(self._line, events)))
        except Exception as error:  # noqa: BLE001 (a failure to print must not use up the attempts of the event)
            await self.on_error(error)
            await self._hold()

    def _line(self, event: Event) -> bytes:
        assert event.stream is not None
        return self._render(event, self._queue_of(event.stream))

    async def _hold(self) -> None:
        """Keep the handler of the current event waiting until the end. If it failed now, the event would be retried,
        and become a dead letter."""
        await self._closing.wait()
        raise LimitReached


class BatchPrinter(EventPrinter):
    """Prints every event, one batch at a time."""

    async def on_next_batch(self, batch: EventBatch) -> None:
        await self._print(batch.events())


class LimitedPrinter(EventPrinter):
    """Prints `limit` events, one at a time, and leaves the others unfinished."""

    def __init__(self, render: Render, queue_of: Callable[[StreamId], int], limit: int) -> None:
        super().__init__(render, queue_of)
        self._to_start = self._to_finish = limit

    async def on_next(self, event: Event) -> None:
        if not self._to_start:
            await self._hold()
        self._to_start -= 1
        await self._print([event])
        self._to_finish -= 1
        if not self._to_finish:
            self.ended.set_result(None)


async def _subscribe(
    data_place: DataPlace,
    how: Mapping[str, Any],
    wanted: SubscribeOptions,
    format_: Format,
    limit: int | None,
    *,
    follow: bool,
) -> None:
    render = renderer(format_)
    predicate = all_of([parse_filter(text) for text in wanted.filters])
    async with opened(data_place, how, create=how["adapter"] is not None) as provider:
        from ...streams.handlers import SubscriptionDeclaration  # noqa: PLC0415 (not for --help)

        await _forget_left_behind(provider)
        agents_log = logging.getLogger("headrace.agents")
        agents_log.addFilter(_is_no_limit)
        if not follow:
            agents_log.addFilter(_is_not_damage)
        queue_of = provider.queue_of
        printer = BatchPrinter(render, queue_of) if limit is None else LimitedPrinter(render, queue_of, limit)
        definition = await wanted.at(provider)
        subscription = await provider.attach(
            SubscriptionDeclaration(provider.name, definition, printer, False, predicate, 1000), stands_by=False
        )
        try:
            await _until_end(printer, subscription, follow=follow)
        finally:
            printer.close()
            await _withdraw(provider, definition.name)
            if wanted.name is None:
                await _forget(provider, definition.name)


async def _subscribe_to_silo(
    server: SiloPlace, wanted: SubscribeOptions, format_: Format, limit: int | None, *, follow: bool
) -> None:
    passes = all_of([parse_filter(text) for text in wanted.filters])
    async with connected(server) as client:
        definition = await wanted.of(client)
        await print_from(client, definition, renderer(format_), passes, limit, follow=follow)


async def _withdraw(provider: Provider, name: str) -> None:
    with suppress(NotFound):  # another process has taken it
        await provider.withdraw(name, DRAIN_S)


async def _until_end(printer: EventPrinter, subscription: LocalSubscription, *, follow: bool) -> None:
    if follow:
        await printer.ended
        return
    caught_up = asyncio.create_task(subscription.caught_up(), name="headrace subscribe caught up")
    try:
        await asyncio.wait((caught_up, printer.ended), return_when=asyncio.FIRST_COMPLETED)
        await (printer.ended if printer.ended.done() else caught_up)
    finally:
        await end(caught_up)


async def _forget_left_behind(provider: Provider) -> None:
    """Delete the subscriptions of killed processes. They would prevent the deletion of events."""
    for definition in await provider.store.subscriptions(provider.name):
        if definition.name.startswith(EPHEMERAL):
            await _forget(provider, definition.name)


async def _forget(provider: Provider, name: str) -> None:
    with suppress(Busy, NotFound):  # busy: another command prints it
        async with provider.exclusive(name):
            await provider.store.delete_subscription(provider.name, name)
