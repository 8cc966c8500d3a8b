"""Power cuts: record a process, build images of the disk after a cut, and open them.

    python -m tests.storage.power_loss --images 5000     # `make chaos`; --bugs plants each bug
    python -m tests.storage.power_loss --recording DIR --image 212/4711

An image is named by the sync before whose end the power is cut, and a seed.
"""

import argparse
import asyncio
import json
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.storage.checks import Found, check, check_nothing
from tests.storage.disk import PAGE, SECTOR, Disk, Kept
from tests.storage.events import Journal, Named
from tests.storage.isolated import PROCESSES, Killed, in_processes, isolated, temporary, warm_up
from tests.storage.planted import IN_THE_PROCESS, IN_THE_RECORDING
from tests.storage.recording import Step, record, steps_of
from tests.storage.workload import options_of

PARTS = 2
KINDS = ("all", "nothing", "prefix", "whole writes", "sectors", "pages", "all but one", "each file")


class Image(NamedTuple):
    """One image: the power is cut at a sync, and a seed decides which data is kept."""

    sync: int
    seed: int

    def __str__(self) -> str:
        return f"{self.sync}/{self.seed}"


class Outcome(NamedTuple):
    image: Image
    found: Found


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A directory with the files of a process: `root` as it was left, `journal`, and the traces."""

    path: Path
    durability: str = "commit"
    retain_bytes: int = 0
    bug: str = ""

    @property
    def traces(self) -> Sequence[Path]:
        return [self.path / f"trace-{part}" for part in range(PARTS)]

    def make(self, seed: int, calls: int) -> "Recording":
        """Run the workload. Raises NotAvailable without strace, RuntimeError if the workload fails."""
        (self.path / "root").mkdir(parents=True)
        bug = [self.bug] if self.bug in IN_THE_PROCESS else []
        for part, trace in enumerate(self.traces):
            arguments = (self.durability, self.retain_bytes, part, seed, calls)
            command = (sys.executable, "-m", "tests.storage.workload", self.path / "root/data", self.path / "journal")
            code = record([*map(str, (*command, *arguments)), *bug], trace)
            if code != (-9 if part == 0 else 0):
                raise RuntimeError(f"part {part} of the workload ended with {code}")
            if part == 0:
                self._keep_mapped()
        (self.path / "recording.json").write_text(json.dumps([self.durability, self.retain_bytes, self.bug]))
        return self

    def _keep_mapped(self) -> None:
        """Files that are written through memory, as the killed process left them."""
        stale = self.path / "stale"
        for pattern in ("**/*-shm", "**/lock.mdb"):
            for file in (self.path / "root").glob(pattern):
                copy = stale / file.relative_to(self.path / "root")
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)

    def stale(self) -> dict[str, bytes]:
        folder = self.path / "stale"
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    def steps(self) -> list[Step]:
        steps = steps_of(self.traces, self.path / "root", self.path / "journal")
        return IN_THE_RECORDING[self.bug](steps) if self.bug in IN_THE_RECORDING else steps


def recording_at(path: Path) -> Recording:
    durability, retain_bytes, bug = json.loads((path / "recording.json").read_text())
    return Recording(path=path, durability=durability, retain_bytes=retain_bytes, bug=bug)


def cuts(steps: Sequence[Step]) -> list[int]:
    """The steps at which a sync is about to end, and the end of all: between two of them, everything that is pending
    may be kept or not, so that a cut at any other step leaves nothing else."""
    ends = [number for number, step in enumerate(steps) if step.ends and (step.kind == "sync" or step.durable)]
    return [*ends, len(steps)]


def kept(image: Image, pending: Sequence[int], rng: random.Random) -> Kept:
    """How much of the pending data an image keeps."""
    kind = KINDS[image.seed % len(KINDS)]
    share = rng.choice((0.1, 0.5, 0.9))
    match kind:
        case "all":
            return Kept(1, 0)
        case "nothing":
            return Kept(0, 0)
        case "prefix" if pending:
            return Kept(1, 0, prefix=rng.choice(pending))
        case "all but one" if pending:
            return Kept(1, 0, without=rng.choice(pending))
        case "sectors":
            return Kept(share, SECTOR)
        case "pages":
            return Kept(share, PAGE)
        case "each file":
            return Kept(0.5, 0, by_file=True)
        case _:
            return Kept(share, 0)


class Builder:
    """Goes through a recording once, and builds the images of its cuts."""

    def __init__(self, recording: Recording, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._cuts = cuts(steps)
        self._stale = recording.stale()
        self._disk = Disk()
        self._journal = Journal()
        self._at = 0
        self._syncing: dict[int, frozenset[Named]] = {}

    def build(self, image: Image, target: Path) -> Journal:
        """Write an image. Return the journal up to its cut. Ask for images in the order of their cuts."""
        cut = self._cuts[image.sync]
        for step in self._steps[self._at : cut]:
            self._apply(step)
        self._at = cut
        if cut < len(self._steps) and self._steps[cut].begins:  # its end is not reached
            self._apply(self._steps[cut]._replace(ends=False))
            self._steps = [*self._steps[:cut], self._steps[cut]._replace(begins=False), *self._steps[cut + 1 :]]
        rng = random.Random(f"{image.sync}/{image.seed}")
        self._disk.build(target, rng, kept(image, self._disk.pending(), rng), self._stale)
        return self._journal

    def _apply(self, step: Step) -> None:
        if step.kind == "note":
            self._journal.read(step.data)
            return
        self._disk.apply(step)
        if step.kind == "sync" and step.path.endswith("data.mdb"):
            if step.begins:
                self._syncing[step.call] = frozenset(self._journal.of("acknowledged"))
            if step.ends:
                self._journal.synced = self._syncing.pop(step.call)


def _try(recording: Recording, target: Path, journal: Journal, _: object) -> Found:
    options = options_of(recording.durability, recording.retain_bytes)
    return asyncio.run(
        check(
            target / "data",
            journal,
            options,
            all_stored=not recording.retain_bytes,
            may_lose=recording.durability == "relaxed",
        )
    )


def try_images(recording: Recording, steps: Sequence[Step], images: Sequence[Image]) -> Iterator[Outcome]:
    """Build and check images, in the order of their cuts."""
    logging.disable(logging.CRITICAL)
    builder = Builder(recording, steps)
    for image in sorted(images):
        with temporary() as folder:
            target = folder / "root"
            journal = builder.build(image, target)
            try:
                found = isolated(partial(_try, recording, target, journal), image)
            except Killed as killed:
                fault = f"the process was killed: {killed}"
                found = Found([] if recording.durability == "relaxed" else [fault], [fault])
            except RuntimeError as error:
                found = Found([f"an unforeseen error: {error}"])
        yield Outcome(image, found)


@dataclass
class Counts:
    """Adds up the findings."""

    images: int = 0
    writes: int = 0
    syncs: int = 0
    reported: int = 0
    lost: int = 0
    wrong: int = 0
    failed: list[tuple[Recording, Outcome]] = field(default_factory=list[tuple[Recording, Outcome]])
    faults: Counter[str] = field(default_factory=Counter[str])

    def add(self, recording: Recording, outcome: Outcome) -> None:
        found = outcome.found
        self.images += 1
        self.reported += bool(found.faults)
        self.lost += found.lost
        self.wrong += found.wrong
        self.faults.update(fault.partition(": ")[0] for fault in found.faults)
        if found.problems:
            self.failed.append((recording, outcome))

    def include(self, other: "Counts") -> None:
        """Add the findings of another recording."""
        self.images += other.images
        self.writes += other.writes
        self.syncs += other.syncs
        self.reported += other.reported
        self.lost += other.lost
        self.wrong += other.wrong
        self.failed += other.failed
        self.faults.update(other.faults)

    def __str__(self) -> str:
        return (
            f"{self.images:,} images tried, {self.writes:,} writes and {self.syncs:,} syncs recorded, "
            f"{self.reported:,} faults reported, {self.wrong} wrong payloads, {self.lost} acknowledged events lost, "
            f"{len(self.failed)} images with problems"
        )


def chosen(count: int, steps: Sequence[Step], seed: int) -> list[Image]:
    """Images spread evenly over the cuts, each with another seed."""
    places = len(cuts(steps))
    rng = random.Random(seed)
    first = rng.randrange(1 << 20) * len(KINDS)
    return [
        Image((number * places // count if count < places else number) % places, first + number + number // places)
        for number in range(count)
    ]


def run(recording: Recording, count: int, seed: int) -> Counts:
    """Try so many images of a recording."""
    steps = recording.steps()
    counts = Counts()
    disk = Disk()
    for step in steps:
        disk.apply(step)
    counts.writes, counts.syncs = disk.writes, disk.syncs
    images = chosen(count, steps, seed)
    for outcome in in_processes(partial(try_images, recording, steps), images, PROCESSES):
        counts.add(recording, outcome)
    return counts


def again(recording: Recording, image: Image) -> str:
    return f"python -m tests.storage.power_loss --recording {recording.path} --image {image}"


def show(durability: str, retain_bytes: int, counts: Counts) -> None:
    print(f"durability {durability}, retain_bytes {retain_bytes}: {counts}", flush=True)
    for recording, outcome in counts.failed[:20]:
        print(f"  {outcome.image}: {outcome.found.problems[0]}")
        print(f"    again: {again(recording, outcome.image)}", flush=True)


RECORDINGS = (("commit", 0), ("relaxed", 0), ("commit", 60_000))
"""Durability, and how many bytes each queue retains (0: all)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=600, help="how many, of each recording")
    parser.add_argument("--recordings", type=int, default=len(RECORDINGS), help="the first so many kinds of recordings")
    parser.add_argument("--rounds", type=int, default=1, help="how many recordings of each kind share the images")
    parser.add_argument("--calls", type=int, default=100, help="calls of each publisher in each part")
    parser.add_argument("--seed", type=int, default=None, help="what is published, and which images are tried")
    parser.add_argument("--bugs", action="store_true", help="plant each bug: by how many images it is found")
    parser.add_argument("--recording", type=Path, help="an earlier recording, instead of new ones")
    parser.add_argument("--image", help="one image of it, such as 212/4711")
    parser.add_argument("--keep", type=Path, help="with --image: leave the image in this new directory")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    warm_up(check_nothing)
    if options.image:
        return _one(recording_at(options.recording), options.image, options.keep)
    if options.recording:
        recording = recording_at(options.recording)
        counts = run(recording, options.images, seed)
        show(recording.durability, recording.retain_bytes, counts)
        return bool(counts.failed)
    print(f"seed {seed}", flush=True)
    if options.bugs:
        return _plant(options.images, options.calls, seed)
    shares = [
        options.images * (one + 1) // options.rounds - options.images * one // options.rounds
        for one in range(options.rounds)
    ]
    return _try_all(RECORDINGS[: options.recordings], shares, options.calls, seed)


def _one(recording: Recording, name: str, keep: Path | None) -> int:
    sync, seed = map(int, name.split("/"))
    steps = recording.steps()
    (outcome,) = try_images(recording, steps, [Image(sync, seed)])
    if keep:
        Builder(recording, steps).build(outcome.image, keep)
    print("\n".join([*outcome.found.problems, *outcome.found.faults]) or "no problem")
    return bool(outcome.found.problems)


def _try_all(recordings: Sequence[tuple[str, int]], shares: Sequence[int], calls: int, seed: int) -> int:
    """Make a recording of each kind for each share of the images."""
    everything = Counts()
    for durability, retain_bytes in recordings:
        began = time.monotonic()
        of_kind = Counts()
        for number, images in enumerate(shares):
            path = Path(tempfile.mkdtemp(prefix="headrace-power-loss-"))
            recording = Recording(path=path, durability=durability, retain_bytes=retain_bytes).make(
                seed + number, calls
            )
            counts = run(recording, images, seed + number)
            assert counts.reported < counts.images, "no image could be opened"
            of_kind.include(counts)
            if not counts.failed:
                shutil.rmtree(path)
        show(durability, retain_bytes, of_kind)
        print(f"  in {time.monotonic() - began:.0f} s; faults reported: {dict(of_kind.faults)}", flush=True)
        everything.include(of_kind)
    print(f"all: {everything}", flush=True)
    return bool(everything.failed)


def _plant(images: int, calls: int, seed: int) -> int:
    """Markdown."""
    print("| planted bug | images tried | images with problems | acknowledged events lost | the first problem |")
    print("| --- | ---: | ---: | ---: | --- |")
    missed = 0
    for bug in (*IN_THE_PROCESS, *IN_THE_RECORDING):
        path = Path(tempfile.mkdtemp(prefix="headrace-power-loss-"))
        recording = Recording(path=path, bug=bug).make(seed, calls)
        counts = run(recording, images, seed)
        first = counts.failed[0][1].found.problems[0] if counts.failed else "none"
        print(f"| {bug} | {counts.images} | {len(counts.failed)} | {counts.lost} | {first} |", flush=True)
        missed += not counts.failed
        shutil.rmtree(path)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
