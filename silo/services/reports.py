"""Reports of consumers: check them, fence them, and apply them to the consumer's group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from ...agents import EventRange
from ...proto.v1 import consumer_pb2 as pb
from ...server.methods import parsed
from ...streams.errors import InvalidArgument
from ...streams.identity import StreamId
from ..consumer_groups import AttachedConsumer

MAX_ENTRIES = 100_000
"""Most entries that all reports of a request have together, and most reports."""
CHUNK = 500
"""Number of entries after which other tasks have their turn."""
MAX_DELAY_MS = 7 * 24 * 3600 * 1000
MAX_REASON = 4096

_Entries = Sequence[Any]
"""Some entries of a report, all of one kind."""
_Apply = Callable[[AttachedConsumer, pb.QueueReport, _Entries], list[pb.Refusal]]


async def apply(place: AttachedConsumer, reports: Sequence[pb.QueueReport]) -> list[pb.Refusal]:
    """Apply reports in order. Return a refusal for each acknowledgement and rejection that has no effect.

    A report with another epoch or generation than the queue's is refused as a whole. The rest of a report is refused
    if either changes meanwhile, or another connection takes over the consumer. Raises InvalidArgument for an entry that
    is not valid; entries before it are applied.
    """
    check_count(reports)
    group, member = place
    connection = member.connections

    def is_current(report: pb.QueueReport) -> bool:
        same = member.connections == connection
        return same and group.is_current(report.queue, report.epoch, report.generation)

    refused: list[pb.Refusal] = []
    count = 0
    for report in reports:
        for apply_to_group, entries in _chunks(report):
            if is_current(report):
                refused += apply_to_group(place, report, entries)
            else:
                refused += _refuse(report, entries)
            count += len(entries)
            if count >= CHUNK:
                count = 0
                await asyncio.sleep(0)
        if report.number and is_current(report):
            group.note_applied(member, report.queue, report.number)
    return refused


def following_request(encoded: bytes) -> pb.SubscribeRequest:
    """Decode a request of Subscribe that is not the first one. Raises InvalidArgument."""
    request = parsed(pb.SubscribeRequest, encoded)
    if request.HasField("open"):
        raise InvalidArgument("only the first request of Subscribe has the field open: leave it out, or call again")
    return request


def check_count(reports: Sequence[pb.QueueReport]) -> None:
    """Raise InvalidArgument if there are more entries or reports than a request may have."""
    entries = sum(len(entries) for report in reports for _, entries in _kinds(report))
    if max(entries, len(reports)) > MAX_ENTRIES:
        raise InvalidArgument(
            f"a request has at most {MAX_ENTRIES:,} reports, and their entries are at most as many, not "
            f"{len(reports):,} and {entries:,}: send several requests"
        )


def refuse_all(reports: Iterable[pb.QueueReport]) -> list[pb.Refusal]:
    """Return a refusal for each acknowledgement and rejection."""
    return [_refusal(report, each) for report in reports for each in chain(report.acknowledgements, report.rejections)]


def _kinds(report: pb.QueueReport) -> Sequence[tuple[_Apply, _Entries]]:
    """The entries of a report by kind, in the order in which they are applied."""
    return (
        (_acknowledge, report.acknowledgements),
        (_reject, report.rejections),
        (_release, report.released),
        (_note_unconfirmed, report.unconfirmed),
    )


def _chunks(report: pb.QueueReport) -> Iterator[tuple[_Apply, _Entries]]:
    for apply_to_group, entries in _kinds(report):
        for first in range(0, len(entries), CHUNK):
            yield apply_to_group, entries[first : first + CHUNK]


def _refuse(report: pb.QueueReport, entries: _Entries) -> list[pb.Refusal]:
    return [_refusal(report, each) for each in entries if isinstance(each, (pb.Acknowledgement, pb.Rejection))]


def _refusal(report: pb.QueueReport, each: pb.Acknowledgement | pb.Rejection) -> pb.Refusal:
    return pb.Refusal(
        queue=report.queue, offset=each.offset, index=each.index, epoch=report.epoch, number=report.number
    )


def _acknowledge(
    place: AttachedConsumer, report: pb.QueueReport, entries: Sequence[pb.Acknowledgement]
) -> list[pb.Refusal]:
    (group, member), queue = place, report.queue
    refused: list[pb.Refusal] = []
    for each in entries:
        events = EventRange(queue, each.offset, each.index, each.count)
        holds_part = group.holds_part(member, events)
        if not group.acknowledge(member, events, up_to=each.up_to) or holds_part:
            refused.append(_refusal(report, each))
    return refused


def _reject(place: AttachedConsumer, report: pb.QueueReport, entries: Sequence[pb.Rejection]) -> list[pb.Refusal]:
    group, member = place
    refused: list[pb.Refusal] = []
    for each in entries:
        if each.delay_ms > MAX_DELAY_MS:
            raise InvalidArgument(f"delay_ms of a rejection is at most {MAX_DELAY_MS:,}, not {each.delay_ms:,}")
        events = EventRange(report.queue, each.offset, each.index, each.count)
        delay_s = each.delay_ms / 1000 if each.HasField("delay_ms") else None
        reason = each.reason[:MAX_REASON] or "rejected by its consumer"
        if not group.reject(member, events, reason, delay_s, unavailable=each.unavailable, invalid=each.invalid):
            refused.append(_refusal(report, each))
    return refused


def _release(place: AttachedConsumer, report: pb.QueueReport, entries: Sequence[pb.Released]) -> list[pb.Refusal]:
    group, member = place
    for each in entries:
        group.release(member, EventRange(report.queue, each.offset, each.index))
    return []


def _note_unconfirmed(
    place: AttachedConsumer, report: pb.QueueReport, entries: Sequence[pb.Unconfirmed]
) -> list[pb.Refusal]:
    group, member = place
    events: list[tuple[StreamId, int, int, int]] = []
    for each in entries:
        if not each.count:
            raise InvalidArgument("count of an unconfirmed acknowledgement is at least 1: name each event")
        events.append((StreamId(each.namespace, each.key), each.offset, each.index, each.count))
    group.note_unconfirmed(member, report.queue, report.number, events)
    return []
