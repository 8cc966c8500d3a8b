"""`headrace publish`."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ...streams import Event, NotSupported, StreamId
from ...streams.events import MAX_DELAY, MAX_PRIORITY
from ...streams.publishing import scheduled
from ..outcome import Failed, Interrupted
from ..wording import counted
from .journal import Journal, Notes, NotesOfUser, NotesOnData, Reader, state_folder
from .lines import BadLine, Form, Lines, read_lines
from .options import Place, Server, check_how, connected, creation_options, opened, place_options
from .output import json_option, note, print_json
from .progress import Advance, progress
from .running import run

if TYPE_CHECKING:
    from ...streams.client import Client

STDIN = Path("-")
LINES_AT_ONCE = 4096
"""Each may go to another stream, and a request to a silo has a limit of streams."""
Item = tuple[StreamId, bytes | Event]
PublishMany = Callable[..., Awaitable[object]]
"""`publish_many` of a provider or of a client."""


@click.command("publish")
@place_options
@creation_options
@click.option("--stream", metavar="NS/KEY", help="Publish everything to this stream.")
@click.option("--namespace", metavar="NS", help="Publish to streams of this namespace …")
@click.option("--key-field", metavar="FIELD", help="… whose keys are in this field.")
@click.option("--id-field", metavar="FIELD", help="The field with each event's id.")
@click.option(
    "--time-field",
    metavar="FIELD",
    help="The field with the event's own time, whenever it is stored: ISO 8601 with its zone, or seconds since 1970.",
)
@click.option(
    "--delay",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Deliver the events so much later. It needs an adapter that can, such as redis.",
)
@click.option(
    "--priority",
    type=click.IntRange(0, MAX_PRIORITY),
    metavar="0-99",
    help="Of what is due, the highest goes first. It needs an adapter with priorities, such as redis.",
)
@click.option("--format", type=click.Choice(["json", "raw"]), default="json", show_default=True, help="What a line is.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True), default="-")
@json_option
def command(
    *,
    place: Place,
    how: Mapping[str, Any],
    file: Path,
    as_json: bool,
    delay: float | None,
    priority: int | None,
    **form: Any,
) -> None:
    """Publish each line of FILE, or of stdin, as an event.

    The payload is the line as it is, without its end. With --format json it has to be JSON, and blank lines are left
    out; with --format raw every line is an event.

    A line that is no event ends it, with its number; those before it are published. Mend the file and run the same
    command again: it goes on after what is published, also after kill -9, as long as those lines are unchanged. Once
    all of a file is published, running it again publishes it again. Of stdin nothing is remembered. For publishing to a
    silo, this machine remembers it.
    """
    try:
        check_how(place, how)
        result = run(_publish(place, how, file, Form(**form), _schedule(delay, priority)))
    except Interrupted:
        raise Interrupted("interrupted" if file == STDIN else "interrupted: run it again to go on") from None
    except BadLine as bad:
        raise Failed(f"{_name(file)}:{bad.number}: {bad.reason}; the lines before it are published") from None
    if as_json:
        print_json(result._asdict())
    else:
        done = f"{counted(result.events, 'event')} from {counted(result.lines, 'line')}"
        note(f"published {done} in {result.seconds:.1f} s")


class Result(NamedTuple):
    """What one run of the command did."""

    events: int
    lines: int
    skipped_lines: int
    """Published by an earlier run that was interrupted."""
    seconds: float


class Target(NamedTuple):
    """Where lines are published to."""

    publish_many: PublishMany
    notes: Notes | None
    """None: it cannot tell what is stored, so nothing is remembered."""


@asynccontextmanager
async def _target(place: Place, how: Mapping[str, Any]) -> AsyncGenerator[Target]:
    if isinstance(place, Server):
        async with connected(place) as client:
            yield Target(client.publish_many, await _remote_notes(client, place.address))
        return
    async with opened(place, how, create=True) as provider:
        can_tell = provider.adapter.capabilities.idempotent
        yield Target(provider.publish_many, NotesOnData(provider) if can_tell else None)


async def _remote_notes(client: Client, address: str) -> Notes | None:
    try:
        await client.last_sequence("-")
        return NotesOfUser(client, [one.strip() for one in address.split(",")])
    except NotSupported:
        return None
    except OSError as error:
        why = f"{state_folder()} cannot be used: {error.strerror}"
        note(f"{why}; so, once interrupted, this publishes a file from its start again")
        return None


class Schedule(NamedTuple):
    """When all events of a run are to be delivered."""

    delay: timedelta | None
    priority: int | None


def _schedule(delay_s: float | None, priority: int | None) -> Schedule | None:
    if delay_s is None and priority is None:
        return None
    if delay_s is not None and not delay_s <= MAX_DELAY.total_seconds():
        raise click.UsageError(f"--delay {delay_s:g} is more than {MAX_DELAY.days:,} days")
    return Schedule(None if delay_s is None else timedelta(seconds=delay_s), priority)


async def _publish(place: Place, how: Mapping[str, Any], file: Path, form: Form, schedule: Schedule | None) -> Result:
    began = time.monotonic()
    async with _target(place, how) as target:
        with _descriptor(file) as descriptor:
            journal = _journal(target, file, form, descriptor)
            with journal.alone(file) if journal else nullcontext(), progress(_size(descriptor)) as advance:
                publishing = Publishing(target.publish_many, form, journal, advance, schedule)
                skipped = await publishing.resume(descriptor, _name(file))
                lines = await publishing.publish(descriptor, skipped + 1)
        return Result(publishing.events, lines, skipped, time.monotonic() - began)


class Publishing:
    """Publishes the lines of one file, with a journal or without."""

    def __init__(
        self,
        publish_many: PublishMany,
        form: Form,
        journal: Journal | None,
        advance: Advance,
        schedule: Schedule | None = None,
    ) -> None:
        self.events = 0
        self._schedule = schedule
        self._publish_many = publish_many
        self._form = form
        self._journal = journal
        self._advance = advance
        self._reader = Reader()

    async def resume(self, descriptor: int, name: str) -> int:
        """Move to where an earlier run stopped. Returns the number of lines before it."""
        if self._journal is None:
            return 0
        stored = await self._journal.stored()
        if stored is not None and self._reader.move_to(descriptor, stored):
            note(f"{name}: the first {stored.lines:,} lines are published already, going on after them")
            self._advance(stored.bytes, 0)
            return stored.lines
        if stored is not None:
            note(f"{name}: changed within the {stored.lines:,} lines that are published already, starting anew")
            os.lseek(descriptor, 0, os.SEEK_SET)
        self._journal.start_anew()
        self._reader = Reader()
        return 0

    async def publish(self, descriptor: int, first: int) -> int:
        """Publish all that follows. Returns the number of lines. Raises BadLine once those before it are published."""
        count = 0
        async with aclosing(read_lines(descriptor, first)) as source:
            async for read in source:
                for lines in read.cut(LINES_AT_ONCE):
                    items, bad = self._understand(lines)
                    good = len(lines.lines) if bad is None else bad.number - lines.first
                    await self._store(items, lines.raw(good), good)
                    count += good
                    if bad is not None:
                        raise bad
        if self._journal is not None:
            await self._journal.forget()
        return count

    def _understand(self, lines: Lines) -> tuple[list[Item], BadLine | None]:
        items: list[Item] = []
        for number, line in enumerate(lines.lines, lines.first):
            try:
                item = self._form.event(line)
            except ValueError as error:
                return items, BadLine(number, str(error))
            if item is not None:
                items.append(item)
        return items, None

    def _scheduled(self, items: list[Item]) -> list[Item]:
        if self._schedule is None:
            return items
        return [(stream, scheduled([event], *self._schedule)[0]) for stream, event in items]

    async def _store(self, items: list[Item], raw: bytes, lines: int) -> None:
        self._reader.add(raw, lines)
        items = self._scheduled(items)
        if items and self._journal is not None:
            position = self._reader.position
            sequence = await self._journal.intend(position)
            await self._publish_many(items, sequence=sequence)
            self._journal.published(position)
        elif items:
            await self._publish_many(items)
        self.events += len(items)
        self._advance(len(raw), len(items))


def _descriptor(file: Path) -> AbstractContextManager[int]:
    return nullcontext(sys.stdin.fileno()) if file == STDIN else _opened(file)


@contextmanager
def _opened(file: Path) -> Generator[int]:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _size(descriptor: int) -> int | None:
    status = os.fstat(descriptor)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _journal(target: Target, file: Path, form: Form, descriptor: int) -> Journal | None:
    """None where it would be of no use: what comes through a pipe cannot be read again."""
    if target.notes is None or file == STDIN or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return None
    return Journal(target.notes, os.path.realpath(file), form)


def _name(file: Path) -> str:
    return "stdin" if file == STDIN else str(file)
