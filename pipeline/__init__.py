"""Spark reads and writes streams: a source, a sink, and jobs. See docs/spark.md.

The public names are imported when they are first used: they need the extra `headrace[spark]`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .jobs.archive import ArchiveResult, archive, read_archive
    from .jobs.audit import audit
    from .jobs.findings import AuditResult
    from .jobs.replay import ReplayResult, replay
    from .jobs.rollup import rollup
    from .kafka_records import RECORD_EVENTS, RecordEvent, decode_record
    from .positions import lag
    from .sink import publish_batch, publisher

__all__ = [
    "RECORD_EVENTS",
    "ArchiveResult",
    "AuditResult",
    "RecordEvent",
    "ReplayResult",
    "archive",
    "audit",
    "decode_record",
    "lag",
    "publish_batch",
    "publisher",
    "read_archive",
    "replay",
    "rollup",
]

_WHERE = {
    "RECORD_EVENTS": "kafka_records",
    "RecordEvent": "kafka_records",
    "decode_record": "kafka_records",
    "ArchiveResult": "jobs.archive",
    "AuditResult": "jobs.findings",
    "ReplayResult": "jobs.replay",
    "archive": "jobs.archive",
    "audit": "jobs.audit",
    "lag": "positions",
    "publish_batch": "sink",
    "publisher": "sink",
    "read_archive": "jobs.archive",
    "replay": "jobs.replay",
    "rollup": "jobs.rollup",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
