"""`headrace publish`."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, cast

import click

from ...streams.errors import NotSupported
from ...streams.events import MAX_DELAY, MAX_PRIORITY, Event
from ...streams.identity import StreamId
from ...streams.outcomes import CommandFailed, CommandInterrupted
from ...streams.publishing import scheduled
from ...streams.wording import counted
from .help import SectionedCommand
from .journal import (
    ControlStoreJournals,
    FileReader,
    FoundEntry,
    JournalEntry,
    JournalStore,
    PublishJournal,
    UserFileJournals,
    state_folder,
)
from .lines import BadLine, LineFormat, NumberedLines, read_lines
from .options import (
    NumberRange,
    ProviderPlace,
    SiloPlace,
    check_how,
    connected,
    creation_options,
    opened,
    place_options,
)
from .output import json_option, note, print_json
from .progress import Advance, progress
from .running import run

if TYPE_CHECKING:
    from ...client.client import Client

STDIN = Path("-")
LINES_AT_ONCE = 4096
"""Most lines of one call. Each line may go to another stream, and a request to a silo has a limit of streams."""
Item = tuple[StreamId, bytes | Event]
PublishMany = Callable[..., Awaitable[object]]
"""`publish_many` of a provider or of a client."""


@click.command("publish", cls=SectionedCommand)
@place_options
@creation_options
@click.option("--stream", metavar="NS/KEY", help="Publish everything to this stream.")
@click.option("--namespace", metavar="NS", help="Publish to streams of this namespace …")
@click.option("--key-field", metavar="FIELD", help="… with the key in this field.")
@click.option("--id-field", metavar="FIELD", help="Field with the id of each event.")
@click.option(
    "--time-field",
    metavar="FIELD",
    help="Field with the time of each event: ISO 8601 with a zone, or seconds since 1970.",
)
@click.option(
    "--delay",
    type=NumberRange(min=0),
    metavar="SECONDS",
    help="Deliver the events this much later. Needs an adapter with delays, such as redis, or the provider's delays.",
)
@click.option(
    "--priority",
    type=click.IntRange(0, MAX_PRIORITY),
    metavar="0-99",
    help="Among due events, the highest priority comes first. Needs an adapter with priorities, such as redis.",
)
@click.option(
    "--format", type=click.Choice(["json", "raw"]), default="json", show_default=True, help="Format of a line."
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True), default="-")
@json_option
def command(
    *,
    place: ProviderPlace,
    how: Mapping[str, Any],
    file: Path,
    as_json: bool,
    delay: float | None,
    priority: int | None,
    **form: Any,
) -> None:
    """Publish each line of FILE, or of stdin, as an event.

    The payload is the line without its end. With --format json it has to be JSON, and blank lines are left out. With
    --format raw every line is an event.

    A line that is not an event stops the command, which prints the line's number; the lines before it are published.
    Correct the file and run the same command again: it continues after the published lines, also after kill -9, if they
    have not changed. Once the whole file is published, the same command publishes it once more. With --server, this
    progress is stored on this machine. For stdin no progress is stored.
    """
    try:
        check_how(place, how)
        report = partial(_report, as_json)
        run(_publish(place, how, file, LineFormat(**form), _schedule(delay, priority), report=report))
    except CommandInterrupted:
        raise CommandInterrupted("interrupted" if file == STDIN else "interrupted: run it again to continue") from None
    except BadLine as bad:
        before = "the lines before it are published" if bad.number > 1 else "nothing is published"
        raise CommandFailed(f"{_name(file)}:{bad.number}: {bad.reason}; {before}") from None


class PublishResult(NamedTuple):
    """The result of one run of the command."""

    events: int
    lines: int
    skipped_lines: int
    """Lines published by an earlier run that was interrupted."""
    seconds: float


def _report(as_json: bool, result: PublishResult) -> None:
    events = counted(result.events, "event")
    try:
        if as_json:
            print_json(result._asdict())
        else:
            note(f"published {events} from {counted(result.lines, 'line')} in {result.seconds:.1f} s")
    except OSError:
        with suppress(OSError):  # stderr cannot be written either
            note(f"all lines are published ({events}); only this report could not be written")
        raise


class PublishTarget(NamedTuple):
    """The provider that gets the lines."""

    publish_many: PublishMany
    notes: JournalStore | None
    """None: the adapter does not support sequences, so there is no journal."""


@asynccontextmanager
async def _target(place: ProviderPlace, how: Mapping[str, Any]) -> AsyncGenerator[PublishTarget]:
    if isinstance(place, SiloPlace):
        async with connected(place) as client:
            yield PublishTarget(client.publish_many, await _remote_notes(client, place.address))
        return
    async with opened(place, how, create=True) as provider:
        can_tell = provider.adapter.capabilities.idempotent
        yield PublishTarget(provider.publish_many, ControlStoreJournals(provider) if can_tell else None)


async def _remote_notes(client: Client, address: str) -> JournalStore | None:
    try:
        await client.last_sequence("-")
        return UserFileJournals(client, [one.strip() for one in address.split(",")])
    except NotSupported:
        return None
    except OSError as error:
        why = f"{state_folder()} cannot be used: {error.strerror}"
        note(f"{why}; after an interruption, the next run publishes the file from its start")
        return None


class EventSchedule(NamedTuple):
    """Delay and priority of all events of a run."""

    delay: timedelta | None
    priority: int | None


def _schedule(delay_s: float | None, priority: int | None) -> EventSchedule | None:
    if delay_s is None and priority is None:
        return None
    if delay_s is not None and not delay_s <= MAX_DELAY.total_seconds():
        raise click.UsageError(f"--delay {delay_s:g} is more than {MAX_DELAY.days:,} days")
    return EventSchedule(None if delay_s is None else timedelta(seconds=delay_s), priority)


async def _publish(
    place: ProviderPlace,
    how: Mapping[str, Any],
    file: Path,
    form: LineFormat,
    schedule: EventSchedule | None,
    *,
    report: Callable[[PublishResult], None],
) -> None:
    began = time.monotonic()
    async with _target(place, how) as target:
        with _descriptor(file) as descriptor:
            journal = _journal(target, file, form, descriptor)
            with journal.alone(file) if journal else nullcontext():
                with progress(_size(descriptor)) as advance:
                    publishing = LinePublisher(target.publish_many, form, journal, advance, schedule)
                    skipped = await publishing.resume(descriptor, _name(file))
                    lines = await publishing.publish(descriptor, skipped + 1)
                report(PublishResult(publishing.events, lines, skipped, time.monotonic() - began))
                if journal is not None:
                    # After the report: if it fails, so does the command, and a second run must not double the events.
                    await journal.forget()


class LinePublisher:
    """Publishes the lines of one file, with or without a journal."""

    def __init__(
        self,
        publish_many: PublishMany,
        form: LineFormat,
        journal: PublishJournal | None,
        advance: Advance,
        schedule: EventSchedule | None = None,
    ) -> None:
        self.events = 0
        self._schedule = schedule
        self._publish_many = publish_many
        self._form = form
        self._journal = journal
        self._advance = advance
        self._reader = FileReader()

    async def resume(self, descriptor: int, name: str) -> int:
        """Move to the position at which an earlier run stopped. Return the number of lines before it."""
        if self._journal is None:
            return 0
        found = await self._journal.stored()
        if found is None or not await self._continue(descriptor, name, found):
            self._journal.start_anew()
            self._restart(descriptor)
            return 0
        position = self._reader.position
        self._journal.published(position)
        self._advance(position.bytes, 0)
        return position.lines

    async def _continue(self, descriptor: int, name: str, found: FoundEntry) -> bool:
        """Move to the end of the lines that the queue has. Return False if the published lines have changed. Raises
        CommandFailed if the queue does not know the earlier run."""
        expected = found.position
        unchanged = self._reader.move_to(descriptor, expected)
        if unchanged and found.is_forgotten:
            raise CommandFailed(_forgotten_message(name, found.entry))
        if unchanged and found.last != expected.lines:
            unchanged = await self._move_to_line(descriptor, found.last)
        if not unchanged:
            last = max(found.last, expected.lines)
            note(f"{name}: lines up to {last:,} have changed since an earlier run published them: publishing all lines")
        elif found.last:
            note(f"{name}: continuing after line {found.last:,}{_resume_reason(found)}")
        return unchanged

    async def _move_to_line(self, descriptor: int, line: int) -> bool:
        """Read a file from its start to the end of a line. Return False if it has fewer lines."""
        self._restart(descriptor)
        async with aclosing(read_lines(descriptor)) as source:
            async for read in source:
                count = min(len(read.lines), line - read.first + 1)
                self._reader.add(read.raw(count), count)
                if self._reader.position.lines == line:
                    os.lseek(descriptor, self._reader.position.bytes, os.SEEK_SET)
                    return True
        return False

    def _restart(self, descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        self._reader = FileReader()

    async def publish(self, descriptor: int, first: int) -> int:
        """Publish the lines that follow. Return their number. Raises BadLine after publishing the lines before it."""
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
        return count

    def _understand(self, lines: NumberedLines) -> tuple[list[Item], BadLine | None]:
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


def _resume_reason(found: FoundEntry) -> str:
    if found.last in (found.entry.done.lines, found.entry.next.lines):
        return ": an earlier run published the lines up to it"
    return ", the last one that the queue has: the queue or the progress of the earlier run was restored from a backup"


def _forgotten_message(name: str, entry: JournalEntry) -> str:
    return (
        f"{name}: an earlier run published the lines up to {_last_line(entry)}, but the queue does not know that run "
        "(restored from a backup, or older than seven days): compare the stream with the file, then publish the "
        "missing lines as another file"
    )


def _last_line(entry: JournalEntry) -> str:
    done, next_ = entry.done.lines, entry.next.lines
    return f"{done:,}" if done == next_ else f"{done:,}, perhaps {next_:,}"


def _descriptor(file: Path) -> AbstractContextManager[int]:
    if file != STDIN:
        return _opened(file)
    if cast("TextIO | None", sys.stdin) is None:  # its descriptor was closed when Python started
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "stdin")
    return nullcontext(sys.stdin.fileno())


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


def _journal(target: PublishTarget, file: Path, form: LineFormat, descriptor: int) -> PublishJournal | None:
    """The journal; None for a pipe, which cannot be read again."""
    if target.notes is None or file == STDIN or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return None
    return PublishJournal(target.notes, os.path.realpath(file), form)


def _name(file: Path) -> str:
    return "stdin" if file == STDIN else str(file)
