"""The provider that runs in Spark's driver, to publish to a data directory.

This module states the part of a provider that the pipeline uses. The entry point `provider` of the group
`headrace.embedded` names the function that opens one, as the group `headrace.adapters` names the adapters.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.metadata import entry_points
from typing import Protocol, cast

from ..adapters import QueueAdapter
from ..streams.errors import NotFound
from ..streams.events import EventBatch
from ..streams.publishing import ProducerSequence

GROUP, NAME = "headrace.embedded", "provider"


class EmbeddedProvider(Protocol):
    """An open provider."""

    @property
    def adapter(self) -> QueueAdapter: ...

    def publish_encoded(
        self, batches: Sequence[EventBatch], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[object]:
        """Store encoded batches, all or none. Called in order means stored in order."""
        ...


class OpenProvider(Protocol):
    """Opens the provider `name` of a data directory, for the length of an `async with`."""

    def __call__(
        self, data: str, /, *, name: str, delays: str | None
    ) -> AbstractAsyncContextManager[EmbeddedProvider]: ...


def find_open_provider() -> OpenProvider:
    """Return the function that opens a provider. Raise NotFound if the installed package does not name one."""
    for entry in entry_points(group=GROUP, name=NAME):
        return cast(OpenProvider, entry.load())
    raise NotFound(f"headrace is not fully installed: it has no entry point {GROUP}: {NAME}; install headrace again")
