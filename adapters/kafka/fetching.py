"""Reads one partition in a thread, and hands over its records in groups."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from ...streams.events import EventBatch
from .client import KafkaClients, KafkaRecord, PartitionConsumer
from .epochs import EpochRange
from .formats import RecordFormat
from .ledger import CallPart, call_part

log = logging.getLogger("headrace.adapters.kafka")

POLL_S = 0.2
GROUP_RECORDS = 2000


class FetchedRecord(NamedTuple):
    """A record of the partition, decoded."""

    offset: int
    batch: EventBatch | str
    """The batch, or the reason why the record has none."""
    part: CallPart | None
    time_ms: int


class FetchedGroup(NamedTuple):
    """Records that were fetched together."""

    records: Sequence[FetchedRecord]
    end: int
    """Every record below this offset was handed over."""
    nbytes: int
    paused: bool
    """Whether the partition was silent before."""
    error: KafkaError | Exception | None = None
    """The error that ended the fetching."""
    epochs: Sequence[EpochRange] = ()
    """The leader epochs of the records."""


class PartitionFetcher:
    """Fetches one partition from an offset on, until `stop` is called or an error ends it.

    It stops fetching while more than `waiting_bytes` were handed over and not taken.
    """

    def __init__(
        self,
        clients: KafkaClients,
        place: TopicPartition,
        record_format: RecordFormat,
        deliver: Callable[[FetchedGroup], None],
        *,
        call_place: bytes,
        waiting_bytes: int,
        pause_s: float,
    ) -> None:
        """`deliver` is called on the event loop that makes the fetcher. `call_place`: see `call_part`."""
        self._call_place = call_place
        self._clients = clients
        self._place = place
        self._format = record_format
        self._deliver = deliver
        self._waiting_bytes = waiting_bytes
        self._pause_s = pause_s
        self._loop = asyncio.get_running_loop()
        self._handed = 0
        self._taken = 0
        self._resume = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(
            target=self._run, name=f"headrace kafka partition {place.partition}", daemon=True
        )
        self._thread.start()

    def taken(self, nbytes: int) -> None:
        """The receiver took this many of the bytes that were handed over."""
        self._taken += nbytes
        self._resume.set()

    def stop(self) -> None:
        """Stop soon. Nothing is delivered from now on."""
        self._stopped = True
        self._resume.set()

    async def stopped(self) -> None:
        """Wait until the thread has ended."""
        await self._loop.run_in_executor(None, self._thread.join)

    # ---- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            consumer = self._clients.consumer()
            try:
                consumer.assign([self._place])
                self._fetch(consumer)
            finally:
                consumer.close()
        except KafkaException as error:
            self._hand_over(FetchedGroup((), self._place.offset, 0, False, error.args[0]))
        except Exception as error:
            log.exception("fetching partition %d failed with an unexpected error", self._place.partition)
            self._hand_over(FetchedGroup((), self._place.offset, 0, False, error))

    def _fetch(self, consumer: PartitionConsumer) -> None:
        end, last, accepted = self._place.offset, time.monotonic(), False
        while not self._stopped:
            if self._handed - self._taken > self._waiting_bytes:
                self._resume.wait(POLL_S)
                self._resume.clear()
                last = time.monotonic()
                continue
            first = consumer.poll(POLL_S)
            if first is None:
                continue
            now = time.monotonic()
            group = self._decoded((first, *consumer.consume(GROUP_RECORDS, 0)), end, now - last > self._pause_s)
            last = now
            if group.end > end or group.error is not None or not accepted:
                accepted = True  # the brokers have answered: the receiver hears of it also at the end of the partition
                end = group.end
                self._handed += group.nbytes
                self._hand_over(group)
            if group.error is not None:
                return

    def _decoded(self, found: Sequence[KafkaRecord], end: int, paused: bool) -> FetchedGroup:
        records: list[FetchedRecord] = []
        epochs: list[EpochRange] = []
        nbytes, known, low, high = 0, None, end, end
        decode, place = self._format.batch, self._call_place
        for record in found:
            error = record.error()
            if error is None:
                offset, headers = record.offset(), record.headers()
                part = call_part(headers, place) if headers else None
                records.append(FetchedRecord(offset, decode(record, headers), part, record.timestamp()[1]))
                if (epoch := record.leader_epoch()) != known:
                    _add_epoch(epochs, known, low, high)
                    known, low = epoch, min(end, offset)
                end = high = offset + 1
                nbytes += len(record)
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 (its name)
                end = max(end, record.offset())
            else:
                _add_epoch(epochs, known, low, high)
                return FetchedGroup(records, end, nbytes, paused, error, epochs)
        _add_epoch(epochs, known, low, high)
        return FetchedGroup(records, end, nbytes, paused, None, epochs)

    def _hand_over(self, group: FetchedGroup) -> None:
        if self._stopped:
            return
        try:
            self._loop.call_soon_threadsafe(self._arrived, group)
        except RuntimeError:  # the loop is closed
            self._stopped = True

    def _arrived(self, group: FetchedGroup) -> None:
        if not self._stopped:
            self._deliver(group)


def _add_epoch(epochs: list[EpochRange], epoch: int | None, low: int, high: int) -> None:
    """Add the epoch of the records from offset `low` up to `high`, exclusive. None: it is not known."""
    if epoch is not None:
        epochs.append(EpochRange(epoch, low, high))
