"""The result of an audit: the number of events of each class, and details of the problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...streams.identity import SequenceToken, StreamId

DELIVERED, DEAD, SKIPPED, FILTERED, PENDING = "delivered", "dead-lettered", "skipped", "filtered", "pending"
MISSING, DUPLICATE, CONTRADICTED, UNKNOWN = "missing", "duplicate", "delivered and dead-lettered", "unknown"
PUBLISHED_TWICE = "published twice"
CLASSES = (DELIVERED, DEAD, SKIPPED, FILTERED, PENDING, MISSING, DUPLICATE, CONTRADICTED)
"""Each published event is of one of these classes. `UNKNOWN`: delivered and never published."""
PROBLEMS = (MISSING, DUPLICATE, CONTRADICTED, UNKNOWN, PUBLISHED_TWICE)
LIMIT = 100
"""Default number of details of a subscription."""


class AuditFinding(NamedTuple):
    """Events of one stream that are of one class, for one reason."""

    kind: str
    namespace: str | None
    """None, as `key` is: the stream is unknown, because the events are gone."""
    key: str | None
    queue: int
    first: SequenceToken
    last: SequenceToken
    events: int | None
    """Events of this kind between both tokens. None: unknown, because the events are gone."""
    reason: str

    def document(self) -> dict[str, Any]:
        stream = None if self.namespace is None else str(StreamId(self.namespace, self.key or ""))
        tokens = {"first": str(self.first), "last": str(self.last)}
        return {"kind": self.kind, "stream": stream, "queue": self.queue, **tokens, "events": self.events} | {
            "reason": self.reason
        }


class SubscriptionAudit(NamedTuple):
    """The events of one subscription, by class."""

    name: str
    published: int
    counts: Mapping[str, int]
    """Events by class: all of `CLASSES`, and `UNKNOWN`."""
    lost_offsets: int
    """Batches that retention removed before they were done, without a gap record."""
    findings: Sequence[AuditFinding]
    """The worst first, up to the limit."""
    exact: bool
    """False: a silo does not name the streams that are behind, so some events count as pending that are done."""

    @property
    def ok(self) -> bool:
        return not self.lost_offsets and not any(self.counts[kind] for kind in PROBLEMS if kind in self.counts)

    def document(self) -> dict[str, Any]:
        counts = {kind.replace(" ", "_").replace("-", "_"): number for kind, number in self.counts.items()}
        findings = [finding.document() for finding in self.findings]
        numbers = {"published": self.published, **counts, "lost_offsets": self.lost_offsets}
        return {"name": self.name, "ok": self.ok, "exact": self.exact, **numbers, "findings": findings}


class AuditResult(NamedTuple):
    """The result of an audit."""

    events: int
    """Events of all streams of the audit."""
    published_twice: int
    """Events with an id that an earlier one of the same stream has."""
    holes: int
    """Offsets that are missing in the log."""
    findings: Sequence[AuditFinding]
    """Problems of the published events themselves."""
    subscriptions: Sequence[SubscriptionAudit]

    @property
    def ok(self) -> bool:
        return not self.published_twice and not self.holes and all(one.ok for one in self.subscriptions)

    def document(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "events": self.events,
            "published_twice": self.published_twice,
            "holes": self.holes,
            "findings": [finding.document() for finding in self.findings],
            "subscriptions": [one.document() for one in self.subscriptions],
        }
