"""How fast LMDB stores blocks, by how it is opened: the measurements behind the choices of the log adapter.

    python -m benchmarks.log_variants [--directory DIR] [--rounds N] [--megabytes N]

Each measurement has a process of its own. A round has each once, in random order, so that a busy neighbour hurts all
alike, and the table shows medians. Memory that a virtual machine touches for the first time costs several times as much
as memory that it has used before, so a larger file is written and removed first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import statistics
import struct
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from headrace.adapters.log.allocator import prefer_reuse

MAP_BYTES = 1 << 34


class Variant(NamedTuple):
    name: str
    options: dict[str, Any]
    reuse: bool = True
    """Keep freed buffers, as the adapter does."""
    allocated: bool = False
    """Allocate the disk before anything is written."""


class Size(NamedTuple):
    name: str
    block_bytes: int
    per_commit: int


class Measured(NamedTuple):
    megabytes_per_s: float
    commit_ms: float
    cpu_ms_per_megabyte: float


VARIANTS = (
    Variant("as the adapter does it", {"meminit": False}),
    Variant("freed buffers not kept", {"meminit": False}, reuse=False),
    Variant("disk allocated before", {"meminit": False}, allocated=True),
    Variant("meminit=True", {}),
    Variant("metasync=False", {"meminit": False, "metasync": False}),
    Variant("sync=False", {"meminit": False, "sync": False}),
    Variant("writemap=True", {"meminit": False, "writemap": True}),
    Variant("LMDB 1.0", {"meminit": False, "lib_version": 1}),
)
SIZES = (
    Size("1 block of 105 KB", 105_000, 1),
    Size("8 blocks of 105 KB", 105_000, 8),
    Size("4 blocks of 210 KB", 210_000, 4),
    Size("8 blocks of 1 MB", 1_050_000, 8),
)


def store(variant: Variant, size: Size, directory: Path, megabytes: int) -> Measured:
    """Store that much, and say how fast it went."""
    if variant.reuse:
        prefer_reuse()
    environment = lmdb.open(str(directory), map_size=MAP_BYTES, max_dbs=1, **variant.options)
    database = environment.open_db(b"blocks")
    if variant.allocated:
        allocate(directory / "data.mdb", megabytes * 1_200_000)
    payload = os.urandom(size.block_bytes)
    commits = max(megabytes * 1_000_000 // (size.block_bytes * size.per_commit), 1)
    cpu, began = time.process_time(), time.perf_counter()
    for commit in range(commits):
        with environment.begin(write=True) as txn:
            for block in range(size.per_commit):
                txn.put(struct.pack(">QQ", commit, block), payload, append=True, db=database)
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    environment.close()
    stored = commits * size.per_commit * size.block_bytes / 1e6
    return Measured(stored / took, took / commits * 1000, cpu / stored * 1000)


def allocate(path: Path, nbytes: int) -> None:
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)


def measure(variant: Variant, size: Size, parent: Path, megabytes: int) -> Measured:
    directory = Path(tempfile.mkdtemp(dir=parent))
    spawning = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=spawning) as process:
            return process.submit(store, variant, size, directory, megabytes).result()
    finally:
        shutil.rmtree(directory)


def warm_up(parent: Path, megabytes: int) -> None:
    with tempfile.TemporaryFile(dir=parent) as file:
        for _ in range(megabytes):
            file.write(bytes(1_000_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk in question")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=100, help="stored by each measurement")
    chosen = parser.parse_args()
    warm_up(chosen.directory, chosen.megabytes * 4)
    print(f"MB/s, ms per commit, CPU ms per MB: median of {chosen.rounds} rounds\n")
    print("| | " + " | ".join(size.name for size in SIZES) + " |")
    print("|---|" + "---|" * len(SIZES))
    cases = [(variant, size) for variant in VARIANTS for size in SIZES]
    rounds = [
        {
            (v.name, s.name): measure(v, s, chosen.directory, chosen.megabytes)
            for v, s in random.sample(cases, len(cases))
        }
        for _ in range(chosen.rounds)
    ]
    for variant in VARIANTS:
        cells = [[done[variant.name, size.name] for done in rounds] for size in SIZES]
        medians = [[statistics.median(column) for column in zip(*cell, strict=True)] for cell in cells]
        print(f"| {variant.name} | " + " | ".join(f"{a:.0f}, {b:.2f}, {c:.2f}" for a, b, c in medians) + " |")


if __name__ == "__main__":
    main()
