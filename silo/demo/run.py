"""A run of the demo on a data directory: begun, or gone on with.

    DIR/demo/run.json          the run's settings, and how far it is
    DIR/demo/<job>.ledger      what each job was given

An interrupted run is gone on with, under its own settings. One that ended makes room for the next on the same
directory, which first removes what the demo made there.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ...streams import DataDirectoryError, InvalidArgument
from ..datadir import DataDirectory, lock, open_data_directory


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run is asked for. None: whatever the run has that is gone on with, or else the default."""

    events: int | None = None
    policy: Literal["throttle", "detach"] | None = None
    durability: Literal["commit", "relaxed"] | None = None


DEFAULTS = Settings(policy="detach", durability="commit")


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of run.json."""

    settings: Settings
    """All of them are set."""
    flights: int
    """Fingerprint of the file they come from."""
    state: Literal["running", "stopped", "ended"] = "running"
    crashes: int = 0
    """How often it was gone on with after it had not stopped in order: only then may events come twice."""


@dataclass
class Run:
    """A run of this process, and the only one on its directory."""

    directory: DataDirectory
    record: Record
    resumed: bool

    @property
    def folder(self) -> Path:
        return self.directory.path / "demo"

    def save(self, state: Literal["running", "stopped", "ended"]) -> None:
        self.record.state = state
        unfinished = self.folder / "run.json.unfinished"
        unfinished.write_bytes(msgspec.json.encode(self.record))
        unfinished.replace(self.folder / "run.json")


@contextmanager
def opened(path: Path, wanted: Settings) -> Generator[tuple[DataDirectory, Record | None]]:
    """Hold the directory for a run, for as long as the `with` lasts, and look at what the last one left.

    Raises DataDirectoryError for a directory with anything but a demo in it, Busy while another demo runs on it,
    InvalidArgument where `wanted` is not what the run has that is to be gone on with.
    """
    directory = open_data_directory(path)
    record = _read(directory.path)
    if record is None and (directory.path / "providers").exists():
        raise DataDirectoryError(f"data directory {path}: holds other data than the demo's: name another directory")
    with lock(directory, ".demo", "run", f"the demo is run on {path}"):
        record = _read(directory.path)  # nobody else writes it now
        if record is not None and record.state != "ended":
            check_same(path, record.settings, wanted)
        yield directory, record


def check_same(path: Path, run: Settings, wanted: Settings) -> None:
    """Raise InvalidArgument, naming the option, where something else is wanted than the run has."""
    for option in run.__struct_fields__:
        has, asked = getattr(run, option), getattr(wanted, option)
        if asked is not None and asked != has:
            raise InvalidArgument(
                f"data directory {path}: holds an interrupted run with --{option} {has}, not {asked}: leave the option "
                "out to go on with that run, or name another directory"
            )


def begin(directory: DataDirectory, left: Record | None, settings: Settings, flights: int) -> Run:
    """Go on with the run that was left, or begin one with `settings`. `flights` is the fingerprint of the input.

    Raises InvalidArgument where the run to be gone on with had another input.
    """
    if left is not None and left.state != "ended":
        if left.flights != flights:
            raise InvalidArgument(
                f"data directory {directory.path}: holds an interrupted run on another file of flights"
            )
        left.crashes += left.state == "running"
        run = Run(directory, left, resumed=True)
    else:
        run = Run(directory, Record(settings=settings, flights=flights), resumed=False)
        _clear(run)
    run.save("running")
    return run


def _read(path: Path) -> Record | None:
    try:
        return msgspec.json.decode((path / "demo" / "run.json").read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise DataDirectoryError(f"data directory {path}: damaged, demo/run.json: {error}") from None


def _clear(run: Run) -> None:
    """Remove a run that ended. The queues vanish at once, not file by file: half of them would be a damaged log."""
    path, removed = run.directory.path, run.folder / "removed"
    run.folder.mkdir(exist_ok=True)
    shutil.rmtree(removed, ignore_errors=True)
    if (path / "providers").exists():
        (path / "providers").rename(removed)
    for file in (*path.glob("control.db*"), *run.folder.glob("*.ledger")):
        file.unlink()
    shutil.rmtree(removed, ignore_errors=True)
