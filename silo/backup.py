"""Back up a data directory while silos use it, and restore it: see docs/operations.md.

The control store is copied first and the logs second. So the copied progress is older than the copied events, and
events between the two are delivered again. In the other order, progress would be ahead of the events.

A copy is written below `NAME.unfinished`, checked, and renamed at the end: a directory with the final name is whole.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..adapters.log.environment import NO_SPACE
from ..adapters.log.inspection import LogInspection
from ..adapters.log.renewal import leave_out_offsets
from ..store.control_store import ControlStore
from ..store.datadir import MARKER, DataDirectory, check_control_kept, find_data_directory, logs
from ..store.write_ahead_log import find_damage
from ..streams.durable import make_durable_directory, sync_path
from ..streams.errors import Busy, DataDirectoryError, InvalidArgument, StorageError, StorageFull
from ..streams.private_files import FILE_MODE, make_directory
from ..streams.remedies import remedy
from ..streams.wording import counted
from .checking import CheckedAmounts, DirectoryCheck, copy_database, has_other_store
from .in_threads import in_threads


class CopiedDirectory(NamedTuple):
    """A data directory that was copied and checked."""

    checked: CheckedAmounts
    elsewhere: Mapping[str, str]
    """The adapter of each provider whose queues are not in the directory: they are not part of the copy."""


async def back_up(data: Path, target: Path, report_progress: Callable[[CheckedAmounts], None]) -> CopiedDirectory:
    """Copy the data directory `data` to `target`, and check the copy. Silos may run meanwhile.

    The copy is a data directory with every event whose publish returned before the call, and with progress that is not
    ahead of the events. `report_progress` is called with the extent of the check so far.

    Raises InvalidArgument if `target` is there and not empty, Busy if another process writes to it, DataDirectoryError
    if `data` is none, has its control data in a database, or is damaged; StorageFull, StorageError. Then there is no
    `target`.
    """
    source = await asyncio.to_thread(find_data_directory, data)
    return await _copy(source, target, report_progress)


async def restore(backup: Path, data: Path, report_progress: Callable[[CheckedAmounts], None]) -> CopiedDirectory:
    """Make the data directory `data` from a backup, and check it.

    Offsets of events that were published after the backup are not used again, because consumers, jobs and databases of
    users may remember them. Each subscription gets a gap record there.

    Raises as `back_up` does.
    """
    source = await asyncio.to_thread(find_data_directory, backup)
    return await _copy(source, data, report_progress, restored=True)


async def _copy(
    source: DataDirectory, target: Path, report_progress: Callable[[CheckedAmounts], None], *, restored: bool = False
) -> CopiedDirectory:
    if await asyncio.to_thread(has_other_store, source.path):
        raise DataDirectoryError(
            f"data directory '{source.path}': its control data is in a database: back up the database first and the "
            "queues second, as docs/operations.md says"
        )
    await asyncio.to_thread(check_control_kept, source)
    async with in_threads(_unfinished(target, source.path)) as made:
        # Before the control store is copied: a provider that is created meanwhile may be missing in the copy.
        used = await asyncio.to_thread(_used, source)
        await asyncio.to_thread(_copy_control, source, made)
        store = await ControlStore.open(made / "control.db")
        try:
            providers = await store.providers()
            if restored:
                await _forget_silos(store)
        finally:
            await store.aclose()
        known = {provider.name for provider in providers}
        unknown = {name: was_used for name, was_used in used.items() if name not in known}
        await asyncio.to_thread(_refuse_unknown, source, unknown)
        for provider in providers:
            if provider.adapter == "log":
                await asyncio.to_thread(_copy_log, source.path, made, provider.name)
        # Last: without it, the directory is refused.
        await asyncio.to_thread(_copy_marker, source.path, made)
        check = DirectoryCheck(made, None, report_progress)
        await check.run()
        if check.findings:
            first, number = check.findings[0], counted(len(check.findings), "fault")
            raise DataDirectoryError(
                f"data directory '{source.path}' has {number}, the first: {first.where}: {first.what}: nothing was "
                f"copied: see {remedy('check', data=source.path)}"
            )
        if restored:
            for provider in providers:
                if provider.adapter == "log":
                    await asyncio.to_thread(
                        leave_out_offsets, made / "providers" / provider.name, provider.name, provider.queues
                    )
        await asyncio.to_thread(_seal, made)
    return CopiedDirectory(check.checked, {one.name: one.adapter for one in providers if one.adapter != "log"})


def _copy_control(source: DataDirectory, made: Path) -> None:
    if (damage := find_damage(source.control_db)) is not None:
        raise DataDirectoryError(f"{damage}: see {remedy('check', data=source.path)}")
    faults = copy_database(source.control_db, made / "control.db")
    if faults:
        raise StorageError(f"'{source.control_db}' cannot be copied to '{made}': {faults[0]}")


def _used(source: DataDirectory) -> dict[str, bool | None]:
    """Return, by provider with a log, whether the log has or had events. None: it cannot be read, perhaps because
    another process is creating it."""
    found = dict[str, bool | None]()
    for directory in logs(source.path):
        found[directory.name] = None
        with suppress(DataDirectoryError), LogInspection(directory / "log") as log:
            found[directory.name] = log.was_used()
    return found


def _refuse_unknown(source: DataDirectory, unknown: Mapping[str, bool | None]) -> None:
    """Raise DataDirectoryError if a log has or had events, and the copy would not have its provider; also if the log
    cannot be read."""
    for name, was_used in unknown.items():
        with LogInspection(source.path / "providers" / name / "log") as log:
            if log.was_used() if was_used is None else was_used:
                raise DataDirectoryError(
                    f"data directory '{source.path}': provider {name!r} has a log, but control.db does not know it: "
                    f"nothing was copied: see {remedy('check', data=source.path)}"
                )


async def _forget_silos(store: ControlStore) -> None:
    """Forget the silos of the original, with their leases: otherwise new silos would wait until the leases end."""
    cluster = store.cluster()
    for silo in (await cluster.view()).silos:
        await cluster.declare_dead(silo)
        await cluster.remove(silo)


def _copy_log(source: Path, made: Path, provider: str) -> None:
    target = made / "providers" / provider / "log"
    make_directory(target)
    with LogInspection(source / "providers" / provider / "log") as log:
        log.copy(target)


def _copy_marker(source: Path, made: Path) -> None:
    with _translated(made):
        shutil.copyfile(source / MARKER, made / MARKER)


@contextmanager
def _unfinished(target: Path, source: Path) -> Generator[Path]:
    """Yield a new directory, which gets the name `target` at the end. If the body raises, it is deleted."""
    target = target.absolute()
    if target.resolve().is_relative_to(source.resolve()):
        raise InvalidArgument(f"'{target}' is in the data directory '{source}': name a directory outside of it")
    with _translated(target):
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise InvalidArgument(f"'{target}' exists and is not empty: name a directory that is not there yet")
        made = target.with_name(f"{target.name}.unfinished")
        make_durable_directory(made)
        descriptor = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _lock(descriptor, made)
            _empty(made)
            try:
                yield made
                made.rename(target)
                sync_path(target.parent)
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                raise
        finally:
            os.close(descriptor)


def _lock(descriptor: int, made: Path) -> None:
    """Lock the directory until the descriptor is closed, or the process ends. Raises Busy."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_same = os.path.samestat(os.fstat(descriptor), made.stat())
    except (BlockingIOError, FileNotFoundError):
        is_same = False
    if not is_same:
        raise Busy(f"'{made}' is written by another process: wait for its end")


def _empty(directory: Path) -> None:
    """Delete the files that a killed process has left."""
    for each in directory.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


@contextmanager
def _translated(target: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise StorageFull(f"'{target}': no space left on the device: free some, and try again") from None
        raise StorageError(f"'{error.filename or target}': {error.strerror}") from None


def _seal(directory: Path) -> None:
    """Make all files private and durable."""
    for folder, _, files in os.walk(directory):
        for name in files:
            Path(folder, name).chmod(FILE_MODE)
            sync_path(Path(folder, name))
        sync_path(Path(folder))
