"""Limits of the adapter that are not options."""

from __future__ import annotations

from typing import NamedTuple


class KafkaLimits(NamedTuple):
    """Sizes and times. Tests choose smaller ones."""

    request_s: float = 10.0
    """How long a request of an administrative client may take, in seconds. Requests that the end of a broker may hold
    up get half of it, and are repeated for twice of it."""
    unknown_s: float = 2.0
    """A topic counts as deleted when the brokers have not known it for this long."""
    watch_s: float = 1.0
    """Pause between two checks that the topic is there and is still the same one."""
    watch_answer_s: float = 5.0
    """How long the brokers have to answer such a check, at most `request_s`. Then the queues have a fault."""
    pause_s: float = 0.3
    """After a pause of this length in a partition, the topic is checked before the next records are delivered. A reader
    of a topic that was deleted pauses longer, because the client waits after an error."""
    doubt_s: float = 0.3
    """The topic is checked before a record is reported as stored that waited for longer than this."""
    waiting_bytes: int = 8 << 20
    """A receiver stops fetching while this many bytes wait for `receive`, with `WAITING_RECORD_BYTES` for each
    record."""
    pending_bytes: int = 256 << 20
    """Bytes of records that are not stored yet: above them, a publish raises QueueFull."""
    pending_records: int = 500_000
    snapshot_records: int = 5_000
    """After this many records of a queue, the ledger of its producers is stored."""
    snapshot_bytes: int = 32 << 20
    snapshot_pause_s: float = 1.0
    """Pause between two turns in which ledgers are stored."""
    ledger_bytes: int = 8 << 20
    """A snapshot has at most this many bytes: above them, the producers of the longest time ago are forgotten."""
    commit_s: float = 1.0
    """Pause between two commits of acknowledged offsets to Kafka."""
    show_s: float = 4.0
    """The progress of a subscription is committed at most this often: each commit makes a client."""
    repeat_commit_s: float = 24 * 3600.0
    """The progress of a subscription that stands still is committed again after this time: Kafka forgets commits."""
    epochs_s: float = 5.0
    """Pause between two writes of the leader epochs that were read. They are also written by `aclose`."""
    producers_kept_s: float = 7 * 24 * 3600.0
    """A producer is forgotten this long after its last call."""


KAFKA_LIMITS = KafkaLimits()
