"""Ways back when the log or the control store of a provider is lost: see docs/damage.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from ..adapters import Gap
from ..adapters.log import LogAdapter, LogScan
from ..adapters.log.damage import DamagedRange
from ..adapters.log.renewal import new_log, renewed_start
from ..balancer import StreamQueueMapper
from ..balancer.mapper import VERSION as MAPPER_VERSION
from ..store.control_store import ControlStore, ProviderRecord
from ..store.datadir import (
    DataDirectory,
    check_control_kept,
    find_data_directory,
    lock,
    lock_subscription,
    logs,
    open_data_directory,
)
from ..store.write_ahead_log import DamagedFrame, find_damage
from ..streams.errors import Busy, DataDirectoryError, InvalidArgument, NotFound, NotSupported
from ..streams.identity import SequenceToken, StreamId
from ..streams.subscriptions import Checkpoint, GapRecord, SubscriptionDefinition
from .in_threads import in_threads
from .options import ProviderOptions
from .ownership import identity_key
from .provider import Provider

LOST_LOG = "the log was lost, and begun anew"


@asynccontextmanager
async def control_store(
    data: Path, control: str | None, *, control_lost: bool = False
) -> AsyncGenerator[tuple[DataDirectory, ControlStore]]:
    """A data directory with its control store, in the directory or, with `control`, in the database of that URL.

    With `control_lost` a missing control store is made. Raises DataDirectoryError, also if there is no data directory,
    and StorageError.
    """
    await asyncio.to_thread(find_data_directory, data)
    directory = await asyncio.to_thread(open_data_directory, data, control, control_lost=control_lost)
    if control is None and not control_lost:
        await asyncio.to_thread(check_control_kept, directory)
    store = await ControlStore.open(control or directory.control_db)
    try:
        yield directory, store
    finally:
        await store.aclose()


async def renew_log(data: Path, provider: str, control: str | None = None) -> Mapping[int, int]:
    """Begin an empty log for a provider whose log was deleted or emptied. Return the first offset of each queue.

    Every subscription goes on at the beginning of the new log, with a gap record for each queue, also if its checkpoint
    is damaged. Offsets of the lost log are not used again.

    Raises NotFound, NotSupported if the provider has another adapter than the log, InvalidArgument if it has a log,
    Busy if another process serves one of its subscriptions.
    """
    async with control_store(data, control) as (directory, store):
        record = {each.name: each for each in await store.providers()}.get(provider)
        if record is None:
            raise NotFound(f"the control store of {data} does not know a provider {provider!r}: open it by its name")
        if record.adapter != "log":
            raise NotSupported(f"provider {provider!r} keeps its events with the adapter {record.adapter!r}, not 'log'")
        definitions = await store.subscriptions(provider)
        with ExitStack() as locks:
            for definition in definitions:
                locks.enter_context(await asyncio.to_thread(lock_subscription, directory, provider, definition.name))
            stored = {each.name: await _positions(store, record, each) for each in definitions}
            starts = _starts(record.queues, list(stored.values()))
            async with in_threads(
                new_log(await asyncio.to_thread(directory.provider_dir, provider), provider, starts)
            ) as identity:
                await store.add_gaps([gap for name, at in stored.items() for gap in _gaps(provider, name, at, starts)])
                for name, at in stored.items():
                    await store.seek(provider, name, {queue: Checkpoint(starts[queue]) for queue in at}, LOST_LOG)
                await store.set_value(identity_key(provider), identity)
        return starts


async def _positions(
    store: ControlStore, provider: ProviderRecord, definition: SubscriptionDefinition
) -> Mapping[int, Checkpoint]:
    """The position of a subscription in each queue that it reads: offset 0 if one of its checkpoints is damaged."""
    try:
        return await store.checkpoints(provider.name, definition.name)
    except DataDirectoryError:
        selector, mapper = definition.selector, StreamQueueMapper(provider.queues)
        one = selector.explicit
        queues = [mapper.queue_of(StreamId.parse(selector.pattern))] if one else range(provider.queues)
        return {queue: Checkpoint(0) for queue in queues}


def _starts(queues: int, stored: Sequence[Mapping[int, Checkpoint]]) -> dict[int, int]:
    """Return the first offset of each queue. No lost log has used it."""
    now_us = time.time_ns() // 1000
    known = [max((at[queue].next_offset for at in stored if queue in at), default=0) for queue in range(queues)]
    return {queue: renewed_start(low, now_us) for queue, low in enumerate(known)}


def _gaps(provider: str, name: str, stored: Mapping[int, Checkpoint], starts: Mapping[int, int]) -> list[GapRecord]:
    now_us = time.time_ns() // 1000
    return [
        GapRecord(
            provider, name, queue, None, SequenceToken(at.watermark), SequenceToken(starts[queue]), LOST_LOG, now_us
        )
        for queue, at in stored.items()
    ]


class RenewedControl(NamedTuple):
    """The result of `renew_control`."""

    providers: Sequence[str]
    """Providers that the control store knows again, without subscriptions."""
    damage: DamagedFrame | None
    """Damage in the write-ahead log. The control store has the data that was saved before it."""


async def renew_control(data: Path, control: str | None = None) -> RenewedControl:
    """Make a control store for the logs in a data directory whose control store was lost.

    A log whose provider the control store knows stays as it is. Subscriptions, dead letters, delayed events and tokens
    were in the lost control store, and are gone. If the write-ahead log of the control store is damaged, the data that
    was saved before the damage stays.

    A process that has the lost control store open can save nothing more: each write is refused.

    Raises InvalidArgument if there is nothing to do, Busy if a process serves a subscription or is a silo of a cluster
    there; DataDirectoryError, also if the control store is missing and there is no log; StorageError.
    """
    async with AsyncExitStack() as stack:
        directory = await stack.enter_async_context(_unused(data))
        provider_dirs, damage = await asyncio.to_thread(_logs_and_damage, directory, control)
        # SQLite uses the write-ahead log up to the damage, and removes the log when the database is closed.
        is_repairable = bool(provider_dirs or damage)
        directory, store = await stack.enter_async_context(control_store(data, control, control_lost=is_repairable))
        known = {each.name for each in await store.providers()}
        lost = [each for each in provider_dirs if each.name not in known]
        if not provider_dirs and damage is None:
            raise InvalidArgument(f"data directory '{data}': it has no log: there is nothing to make anew")
        if not lost and damage is None:
            raise InvalidArgument(
                f"data directory '{data}': its control store knows the provider of each log: there is nothing to make "
                "anew; to give up the subscriptions that it has, move control.db away first"
            )
        for own in lost:
            queues, identity = await asyncio.to_thread(_made_with, own)
            await store.set_value(identity_key(own.name), identity)
            await store.register_provider(own.name, adapter="log", queues=queues, mapper=MAPPER_VERSION)
            if directory.id:
                await store.set_value(f"directory/{own.name}", directory.id)
        return RenewedControl([own.name for own in lost], damage)


@asynccontextmanager
async def _unused(data: Path) -> AsyncGenerator[DataDirectory]:
    """Hold all locks in a data directory, and give it. Raises Busy, and DataDirectoryError if it is none."""
    directory = await asyncio.to_thread(find_data_directory, data)
    with ExitStack() as locks:
        for file in await asyncio.to_thread(lambda: sorted((directory.path / "locks").glob("*/*.lock"))):
            what = f"data directory '{data}' is used, see {file.relative_to(directory.path)},"
            locks.enter_context(await asyncio.to_thread(lock, directory, file.parent.name, file.stem, what))
        yield directory


def _logs_and_damage(directory: DataDirectory, control: str | None) -> tuple[Sequence[Path], DamagedFrame | None]:
    """Return the directories of the providers with a log, and the damage in the write-ahead log of the control store.

    If control.db is missing, a log that cannot be read is refused: nothing is made yet.
    """
    provider_dirs = logs(directory.path)
    if control is not None:
        return provider_dirs, None
    if directory.has_control_db():
        return provider_dirs, find_damage(directory.control_db)
    for own in provider_dirs:
        _made_with(own)
    return provider_dirs, None


def _made_with(own: Path) -> tuple[int, str]:
    with LogScan(own) as scan:
        if scan.provider != own.name:
            raise DataDirectoryError(
                f"{own}: its log belongs to a provider {scan.provider!r}: rename the directory to that"
            )
        return scan.queues, str(scan.created_us)


class SkippedDamage(NamedTuple):
    """The result of `skip_damage`."""

    damages: Sequence[DamagedRange]
    noted: Sequence[str]
    """Subscriptions that got a gap record now."""
    serving: Sequence[str]
    """Subscriptions that another process serves: it notes the gap itself when it comes there."""


async def skip_damage(data: Path, provider: str, queue: int, control: str | None = None) -> SkippedDamage:
    """Skip the damaged and missing records of a queue of a log, so that all readers continue after them.

    Each subscription that is not past them gets a gap record. The queue's end and counts are set right, too. Other
    processes may use the provider meanwhile.

    Raises NotFound, NotSupported if the provider has another adapter than the log, InvalidArgument for the queue,
    DataDirectoryError.
    """
    await asyncio.to_thread(find_data_directory, data)
    opened = await Provider.start(data, ProviderOptions(name=provider), control=control, create=False)
    try:
        adapter = opened.adapter if opened.delays is None else opened.delays.inner
        if not isinstance(adapter, LogAdapter):
            raise NotSupported(f"provider {provider!r}: its adapter is not 'log': only a log has records to skip")
        damages = await adapter.skip_damage(queue)
        gaps = [Gap(one.low, one.high, one.reason, skipped=True) for one in damages]
        noted: list[str] = []
        serving: list[str] = []
        for definition in await opened.store.subscriptions(provider) if damages else ():
            try:
                if await _add_gaps(opened, definition.name, queue, gaps):
                    noted.append(definition.name)
            except Busy:
                serving.append(definition.name)
        return SkippedDamage(damages, noted, serving)
    finally:
        await opened.aclose()


async def _add_gaps(provider: Provider, name: str, queue: int, gaps: Sequence[Gap]) -> bool:
    """Store gap records of a subscription. Return False if its position is behind all the gaps.

    Raises Busy if another live process serves the subscription: that process stores them when it reads there.
    """
    async with provider.exclusive(name):
        at = (await provider.store.checkpoints(provider.name, name)).get(queue)
        if at is None:
            return False
        now_us = time.time_ns() // 1000
        records = [
            GapRecord(
                provider.name, name, queue, None, SequenceToken(max(gap.low, at.watermark)), SequenceToken(gap.high),
                gap.reason, now_us,
            )
            for gap in gaps
            if gap.high > at.watermark
        ]  # fmt: skip
        await provider.store.add_gaps(records)
        return bool(records)
