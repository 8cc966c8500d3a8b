"""Spark reads and writes streams: a source, a sink, and jobs. See docs/spark.md.

The public names are imported when they are first used: they need the extra `headrace[spark]`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .jobs.archive import Archived, archive, read_archive
    from .jobs.replay import Replayed, replay
    from .sink import publish_batch, publisher

__all__ = ["Archived", "Replayed", "archive", "publish_batch", "publisher", "read_archive", "replay"]

_WHERE = {
    "Archived": "jobs.archive",
    "Replayed": "jobs.replay",
    "archive": "jobs.archive",
    "publish_batch": "sink",
    "publisher": "sink",
    "read_archive": "jobs.archive",
    "replay": "jobs.replay",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
