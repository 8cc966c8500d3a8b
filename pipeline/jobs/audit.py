"""The job `audit`: compare the published events with the deliveries, dead letters and gaps of each subscription.

The published events are those of the log, and below its first offset those of an archive. A subscription's checkpoints,
dead letters and gap records are read after the ends of the queues, in this order. So the dead letters below a
checkpoint are complete. If the consumers have records of their deliveries, each event is compared with them. Otherwise
an event below the checkpoint counts as delivered. Spark joins all of that by queue, offset and index. This process sees
only counts by stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...streams.subscriptions import Start
from ..options import job_options
from ..place import OPTIONS as PLACE_OPTIONS
from .comparing import SubscriptionComparison, read_deliveries
from .findings import LIMIT, AuditResult, SubscriptionAudit
from .published import PublishedEvents, content
from .subscription_snapshots import read_snapshots

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Progress = Callable[[str, int, int], object]


def audit(
    spark: SparkSession,
    subscriptions: Sequence[str] = (),
    *,
    delivered: str | Path | DataFrame | None = None,
    archive: str | Path | None = None,
    start: Start | None = None,
    limit: int = LIMIT,
    progress: Progress = lambda _name, _done, _total: None,
    **options: object,
) -> AuditResult:
    """Compare the published events with their deliveries, for these subscriptions, or all.

    `delivered` has the consumers' own records: a DataFrame, or a path of Parquet or (`.json`, `.jsonl`) JSON lines.
    Each delivery has a row with `queue`, `offset` and `index`, and with `subscription` if the rows are of several.
    `archive` is an archive of the job `archive`, for events that retention has removed from the log. `start` is the
    first position for all subscriptions. By default it is the start of each; if that is `latest`, the first event in
    `delivered`.

    Details are limited to `limit` for each subscription, counts are not. `options` give the provider's location.
    Nothing is changed. `progress` is called before each subscription, with its name, the number of subscriptions that
    are done, and the number of all. Raise NotFound for an unknown subscription, InvalidArgument for a `delivered`
    without these columns.
    """
    published = PublishedEvents.of(spark, job_options("an audit", options, PLACE_OPTIONS), archive)
    snapshots = asyncio.run(read_snapshots(published.place, subscriptions))
    ledger = None if delivered is None else read_deliveries(spark, delivered, [snapshot.name for snapshot in snapshots])
    found: list[SubscriptionAudit] = []
    for snapshot in snapshots:
        progress(snapshot.name, len(found), len(snapshots))
        found.append(SubscriptionComparison(published, snapshot, start, limit).run(ledger))
    of_all = content(published, [snapshot.definition.selector for snapshot in snapshots], limit)
    return AuditResult(*of_all, found)
