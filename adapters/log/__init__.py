"""The embedded default: a durable log in LMDB. See docs/log.md."""

from .adapter import MAX_BATCH_BYTES, LogAdapter, open_adapter
from .environment import MAX_QUEUES
from .options import LogOptions
from .scan import LogScan
from .transactions import StoredGap

__all__ = ("MAX_BATCH_BYTES", "MAX_QUEUES", "LogAdapter", "LogOptions", "LogScan", "StoredGap", "open_adapter")
