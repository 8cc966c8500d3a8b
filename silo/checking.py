"""Read all of a data directory, and report damaged, missing and inconsistent parts. Nothing is written to it."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from ..adapters.log.damage import MISSING
from ..adapters.log.environment import has_log
from ..adapters.log.inspection import LogInspection, QueueReport
from ..store.control_store import ControlStore, ProviderRecord
from ..store.datadir import MARKER, check_control, find_data_directory, logs
from ..store.write_ahead_log import find_damage
from ..streams.errors import DataDirectoryError, HeadraceError, StorageError
from ..streams.remedies import remedy
from .ownership import identity_key

Kind = Literal["damaged", "missing", "inconsistent"]
_ATTEMPTS = 3
"""A copy of a database that is in use may be torn."""
_BACKUP = "restore it from a backup"


class CheckFinding(NamedTuple):
    """One fault of a data directory."""

    kind: Kind
    where: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}: {self.remedy}"


class CheckedAmounts(NamedTuple):
    """How much of a data directory was read."""

    providers: int = 0
    queues: int = 0
    nbytes: int = 0


class DirectoryCheck:
    """One check of a data directory; `findings` and `checked` grow while it runs.

    `report_progress` is called with the extent of the check so far, about every 8 MiB, from any thread.
    """

    def __init__(self, data: Path, control: str | None, report_progress: Callable[[CheckedAmounts], None]) -> None:
        self.findings: list[CheckFinding] = []
        self.checked = CheckedAmounts()
        self.skipped: list[str] = []
        """Parts that could not be checked from here, and are no fault."""
        self._data = data
        self._control = control
        self._report_progress = report_progress

    async def run(self) -> None:
        """Read everything. Raises NotFound or DataDirectoryError if the directory is none of headrace's, or its control
        data is not where `control` says."""
        directory = await asyncio.to_thread(find_data_directory, self._data)
        if self._control is not None:
            await asyncio.to_thread(check_control, directory, self._control)
        own = directory.path / "providers"
        with tempfile.TemporaryDirectory(prefix="headrace-check-") as scratch:
            async with self._store(directory.control_db, Path(scratch)) as store:
                known = {} if store is None else {one.name: one for one in await store.providers()}
                if store is not None:
                    await self._rows(store)
                    self._check_known(known, own)
                for name in sorted({*known, *await asyncio.to_thread(_logs, own)}):
                    await self._provider(store, name, known.get(name), own / name)

    def _found(self, kind: Kind, where: str, what: str, remedy: str) -> None:
        self.findings.append(CheckFinding(kind, where, what, remedy))

    def _remedy(self, command: str, *arguments: object, provider: str | None = None) -> str:
        store = () if self._control is None else ("--store", "URL")  # the URL may have a password
        return remedy(command, *arguments, *store, data=self._data, provider=provider)

    # ---- control store ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _store(self, control_db: Path, scratch: Path) -> AsyncGenerator[ControlStore | None]:
        """The control store: a copy of it, if it is SQLite. None if it cannot be read."""
        where = self._control or await asyncio.to_thread(self._copied, control_db, scratch / "control.db")
        if where is None:
            yield None
            return
        try:
            shown_as = "control.db" if self._control is None else None
            store = await ControlStore.open(where, existing=self._control is not None, shown_as=shown_as)
        except StorageError as error:
            self._found("damaged", "control store", str(error), _BACKUP)
            yield None
            return
        try:
            yield store
        finally:
            await store.aclose()

    def _copied(self, control_db: Path, copy: Path) -> Path | None:
        if has_other_store(control_db.parent):
            self.skipped.append("the control data is in a database: name it with --store to check it, too")
            return None
        if not control_db.exists() or not control_db.stat().st_size:
            if _logs(control_db.parent / "providers"):
                way = f"{_BACKUP}, or make it anew with {self._remedy('repair control')}"
                self._found("missing", "control.db", "it is missing or empty, but there are logs", way)
            else:
                what = "it is missing or empty, and there is no log: this directory holds no data"
                self._found("missing", "control.db", what, f"check the directory's name, or {_BACKUP}")
            return None
        if (damage := find_damage(control_db)) is not None:
            way = f"{_BACKUP}, or continue with the data saved before it with {self._remedy('repair control')}"
            self._found("damaged", "control.db", str(damage), way)
        faults = ["it cannot be read"]
        for _ in range(_ATTEMPTS):
            faults = copy_database(control_db, copy)
            if not faults:
                return copy
        for fault in faults:
            way = f"{_BACKUP}, or move it away and make it anew with {self._remedy('repair control')}"
            self._found("damaged", "control.db", fault, way)
        return None

    async def _rows(self, store: ControlStore) -> None:
        try:
            damaged = await store.damaged_rows()
        except StorageError as error:
            self._found("damaged", "control store", str(error), _BACKUP)
            return
        for row in damaged:
            self._found("damaged", "control store", row.problem, row.hint)

    def _check_known(self, known: Mapping[str, ProviderRecord], own: Path) -> None:
        store = "control.db" if self._control is None else "the control store"
        for name in _logs(own):
            if name not in known:
                way = f"{_BACKUP}, or make it anew with {self._remedy('repair control')}"
                self._found("inconsistent", f"provider {name!r}", f"it has a log, but {store} does not know it", way)

    # ---- providers -------------------------------------------------------------------------------------------------

    async def _provider(self, store: ControlStore | None, name: str, record: ProviderRecord | None, own: Path) -> None:
        if record is not None and record.adapter != "log":
            self.skipped.append(f"provider {name!r}: its adapter {record.adapter!r} keeps no log in the directory")
            return
        where = f"provider {name!r}"
        if not await asyncio.to_thread(has_log, own / "log"):
            way = f"{_BACKUP}, or begin an empty one with {self._remedy('repair log', provider=name)}"
            self._found("missing", where, "its log was deleted or emptied", way)
            return
        expected = None if store is None else await store.value(identity_key(name))
        try:
            ends = await asyncio.to_thread(self._log, own / "log", name, record, expected)
        except StorageError as error:
            repair = self._remedy("repair log", provider=name)
            self._found("damaged", where, str(error), f"{_BACKUP}, or move it away and run {repair}")
            return
        self.checked = self.checked._replace(providers=self.checked.providers + 1)
        if store is not None and record is not None:
            await self._subscriptions(store, name, ends)

    def _log(self, path: Path, name: str, record: ProviderRecord | None, expected: str | None) -> Sequence[int]:
        """Check a log. Return where its queues end."""
        with LogInspection(path) as log:
            if expected not in (None, log.identity):
                what = "its log does not belong to the control store: it is of another data directory, or older"
                self._found("inconsistent", f"provider {name!r}", what, "put back the right one; see docs/damage.md")
            if record is not None and record.queues != log.queues:
                what = f"its log has {log.queues} queues, its control store says {record.queues}"
                self._found("inconsistent", f"provider {name!r}", what, "put back the right one; see docs/damage.md")
            for queue in range(log.queues):
                self._queue(name, queue, log.check(queue, self._read))
                self.checked = self.checked._replace(queues=self.checked.queues + 1)
            return log.ends()

    def _read(self, nbytes: int) -> None:
        self.checked = self.checked._replace(nbytes=self.checked.nbytes + nbytes)
        self._report_progress(self.checked)

    def _queue(self, name: str, queue: int, report: QueueReport) -> None:
        where, repair = f"provider {name!r}, queue {queue}", self._remedy("repair queue", queue, provider=name)
        for damage in report.damages:
            kind = "missing" if damage.why == MISSING else "damaged"
            self._found(kind, f"{where}, {damage.offsets}", damage.why, f"{_BACKUP}, or skip it with {repair}")
        for fault in report.faults:
            self._found("inconsistent", where, fault, f"set it right with {repair}")

    async def _subscriptions(self, store: ControlStore, provider: str, ends: Sequence[int]) -> None:
        try:
            for definition in await store.subscriptions(provider):
                try:
                    stored = await store.checkpoints(provider, definition.name)
                except DataDirectoryError:  # found with the rows
                    continue
                for queue, at in sorted(stored.items()):
                    where = f"provider {provider!r}, subscription {definition.name!r}"
                    if queue >= len(ends):
                        what = f"it has progress in queue {queue}, which there is not"
                        self._found("inconsistent", where, what, "put back the log and control store of the same time")
                    elif at.next_offset > ends[queue]:
                        what = f"it is at offset {at.next_offset} of queue {queue}, which ends at {ends[queue]}"
                        way = "put back the right log; else the next process moves it back and notes a gap"
                        self._found("inconsistent", where, what, way)
        except (HeadraceError, ValueError) as error:
            self._found("damaged", "control store", str(error), _BACKUP)


def has_other_store(data: Path) -> bool:
    """Whether the marker of a data directory names a database for its control data."""
    marker = msgspec.json.decode((data / MARKER).read_bytes(), type=dict[str, object])
    return marker.get("control") is not None


def _logs(own: Path) -> list[str]:
    return [each.name for each in logs(own.parent)]


def copy_database(control_db: Path, copy: Path) -> list[str]:
    """Copy a database that may be in use. Return its faults."""
    for stale in copy.parent.glob(f"{copy.name}*"):
        stale.unlink()
    try:
        if not _copy_used(control_db, copy):
            for suffix in ("", "-wal"):
                with suppress(FileNotFoundError):
                    shutil.copyfile(f"{control_db}{suffix}", f"{copy}{suffix}")
        with closing(sqlite3.connect(copy)) as database:
            rows: list[tuple[str]] = database.execute("PRAGMA integrity_check(20)").fetchall()
    except sqlite3.Error as error:
        return [str(error)]
    except UnicodeDecodeError:  # SQLite's message quotes the damaged text of a table
        return ["the text of a table is no UTF-8"]
    except OSError as error:
        return [f"it cannot be read ({error.strerror})"]
    return [row[0] for row in rows if row[0] != "ok"]


def _copy_used(control_db: Path, copy: Path) -> bool:
    """Copy a database beside the processes that have it open. False if it has to be copied as a file.

    SQLite would make files beside a database that no process has open.
    """
    if not Path(f"{control_db}-shm").exists():
        return False
    uri = f"{control_db.as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as source, closing(sqlite3.connect(copy)) as target:
        try:
            source.backup(target)
        except sqlite3.OperationalError:  # this user may not write the files beside it
            return False
    return True
