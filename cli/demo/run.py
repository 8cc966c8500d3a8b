"""A run of the demo in a data directory: a new one, or a continued one.

    DIR/demo/run.json          the run's settings, and its state
    DIR/demo/<job>.ledger      the deliveries to each job

An interrupted run is continued with its own settings. After a finished run, the next run in the same directory first
removes the files of the demo.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ...store.datadir import DataDirectory, lock, open_data_directory
from ...streams.errors import DataDirectoryError, InvalidArgument
from ...streams.private_files import make_directory, opener


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requested settings of a run. None: the setting of the continued run, or else the default."""

    events: int | None = None
    policy: Literal["throttle", "detach"] | None = None
    durability: Literal["commit", "relaxed"] | None = None
    adapter: Literal["log", "kafka"] | None = None
    bootstrap: str | None = None
    topic: str | None = None
    """The topic of a run on Kafka. Each run that starts over has a new one."""


DEFAULTS = DemoSettings(policy="detach", durability="commit", adapter="log")


class DemoRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of run.json."""

    settings: DemoSettings
    """All of them are set."""
    flights: int
    """Fingerprint of the file of flights."""
    state: Literal["running", "stopped", "ended"] = "running"
    crashes: int = 0
    """How often it was continued after it had not stopped in order. Only then may events come twice."""


@dataclass
class DemoRun:
    """A run in this process. It is the only run in its directory."""

    directory: DataDirectory
    record: DemoRecord
    resumed: bool

    @property
    def folder(self) -> Path:
        return self.directory.path / "demo"

    def save(self, state: Literal["running", "stopped", "ended"]) -> None:
        self.record.state = state
        unfinished = self.folder / "run.json.unfinished"
        with open(unfinished, "wb", opener=opener) as file:
            file.write(msgspec.json.encode(self.record))
        unfinished.replace(self.folder / "run.json")


@contextmanager
def opened(path: Path, wanted: DemoSettings) -> Generator[tuple[DataDirectory, DemoRecord | None]]:
    """Lock the directory for a `with` block, and read the record of the last run.

    Raises DataDirectoryError if the directory has other data than a demo's, Busy while another demo runs there, and
    InvalidArgument if `wanted` differs from the run that would be continued.
    """
    directory = open_data_directory(path)
    record = _read(directory.path)
    if record is None and (directory.path / "providers").exists():
        raise DataDirectoryError(f"data directory '{path}': holds other data than the demo's: name another directory")
    with lock(directory, ".demo", "run", f"the demo is run on '{path}'"):
        record = _read(directory.path)  # no other process writes it now
        if record is not None and record.state != "ended":
            check_same(path, record.settings, wanted)
        yield directory, record


def check_same(path: Path, run: DemoSettings, wanted: DemoSettings) -> None:
    """Raise InvalidArgument with the option if a setting in `wanted` differs from the run's."""
    for option in run.__struct_fields__:
        has, asked = getattr(run, option), getattr(wanted, option)
        if asked is not None and asked != has:
            raise InvalidArgument(
                f"data directory '{path}': holds an interrupted run with --{option} {has}, not {asked}: leave the "
                "option out to continue that run, or name another directory"
            )


def begin(directory: DataDirectory, left: DemoRecord | None, settings: DemoSettings, flights: int) -> DemoRun:
    """Continue the last run, or begin one with `settings`. `flights` is the fingerprint of the input.

    Raises InvalidArgument if the run to be continued had another input.
    """
    if left is not None and left.state != "ended":
        if left.flights != flights:
            raise InvalidArgument(
                f"data directory '{directory.path}': holds an interrupted run on another file of flights"
            )
        left.crashes += left.state == "running"
        run = DemoRun(directory, left, resumed=True)
    else:
        run = DemoRun(directory, DemoRecord(settings=settings, flights=flights), resumed=False)
        _clear(run)
    run.save("running")
    return run


def _read(path: Path) -> DemoRecord | None:
    try:
        return msgspec.json.decode((path / "demo" / "run.json").read_bytes(), type=DemoRecord)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise DataDirectoryError(f"data directory '{path}': damaged, demo/run.json: {error}") from None


def _clear(run: DemoRun) -> None:
    """Remove a finished run. The queues are removed in one step: a part of their files would be a damaged log."""
    path, removed = run.directory.path, run.folder / "removed"
    make_directory(run.folder)
    shutil.rmtree(removed, ignore_errors=True)
    if (path / "providers").exists():
        (path / "providers").rename(removed)
    for file in (*path.glob("control.db*"), *run.folder.glob("*.ledger")):
        file.unlink()
    shutil.rmtree(removed, ignore_errors=True)
