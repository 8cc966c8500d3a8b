"""Administration of subscriptions and dead letters in a data directory or on a silo."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .options import ProviderPlace, SiloPlace, connected, opened

if TYPE_CHECKING:
    from ...client.stream_provider import SubscriptionAdministration


@asynccontextmanager
async def managed(
    place: ProviderPlace, how: Mapping[str, Any] | None = None, *, create: bool = False
) -> AsyncGenerator[SubscriptionAdministration]:
    """Open the provider at a place. For a data directory, `how` and `create` are as in `opened`."""
    if isinstance(place, SiloPlace):
        async with connected(place) as client:
            yield client
    else:
        async with opened(place, how, create=create) as provider:
            yield provider
