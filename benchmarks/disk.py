"""How many bytes of disk an event takes in the log: `python -m benchmarks.disk`."""

import asyncio
import os
import tempfile
from pathlib import Path

from headrace import Provider

CASES = ((100, 1000, 1_000_000), (100, 10, 500_000), (100, 1, 200_000), (1024, 1000, 200_000), (1024, 1, 50_000))
"""Size of a payload in bytes, events of a batch, and number of events."""
STREAMS, IN_FLIGHT = 100, 1000


async def publish(data: Path, size: int, batch: int, events: int) -> None:
    """Publish random payloads, so that no file system compresses them."""
    async with Provider.open(data) as provider:
        streams = [provider.stream("orders", str(number)) for number in range(STREAMS)]
        for first in range(0, events // batch, IN_FLIGHT):
            numbers = range(first, min(first + IN_FLIGHT, events // batch))
            payloads = [[os.urandom(size) for _ in range(batch)] for _ in numbers]
            calls = zip(numbers, payloads, strict=True)
            await asyncio.gather(*(streams[number % STREAMS].publish(each) for number, each in calls))


def bytes_on_disk(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    for size, batch, events in CASES:
        with tempfile.TemporaryDirectory() as name:
            asyncio.run(publish(Path(name, "data"), size, batch, events))
            each = bytes_on_disk(Path(name, "data")) / events
            print(f"{size:,} B in batches of {batch:,}: {each:.1f} bytes per event")
