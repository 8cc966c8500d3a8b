"""Open the parts of a provider: data directory, control store, adapter, mapper and delays."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from ..adapters import AdapterContext, QueueAdapter, StreamMapper, open_adapter
from ..balancer import StreamQueueMapper
from ..store.control_store import ControlStore
from ..store.datadir import DataDirectory, open_data_directory
from ..streams.errors import NotSupported
from .delays import DelayingAdapter, check_delays_possible
from .options import DEFAULT_ADAPTER, DEFAULT_QUEUES, ProviderOptions
from .ownership import check_known, check_queues, check_same_directory, unknown_provider

log = logging.getLogger("headrace.silo")

LEASED_TIMEOUT_S = 5.0
"""Timeout of a control store's calls in a cluster, where leases depend on them, in seconds."""


class ProviderParts(NamedTuple):
    """The open parts of a provider. `aclose` closes them."""

    options: ProviderOptions
    adapter_name: str
    directory: DataDirectory | None
    store: ControlStore
    adapter: QueueAdapter
    mapper: StreamMapper
    leased: bool
    """The provider belongs to a silo in a cluster: it serves the queues of which the silo has leases."""
    delays: DelayingAdapter | None
    """The adapter, if it is decorated with delays."""
    origin: str = ""
    """Id of the provider: a provider that is made anew has another one."""

    async def aclose(self) -> None:
        await self.adapter.aclose()
        await self.store.aclose()


async def open_parts(
    data: str | os.PathLike[str] | None,
    options: ProviderOptions,
    *,
    control: str | None = None,
    leased: bool = False,
    create: bool = True,
    stores: type[ControlStore] = ControlStore,
) -> ProviderParts:
    """Open the parts of a provider: see `Provider.start`. The control store is one of `stores`."""
    timeout_s = LEASED_TIMEOUT_S if leased else None
    async with AsyncExitStack() as stack:
        store = directory = None
        if control is not None:  # before a directory is claimed for it: its URL may be mistyped
            store = await stores.open(control, timeout_s=timeout_s)
            stack.push_async_callback(store.aclose)
        if data is not None:
            directory = await asyncio.to_thread(open_data_directory, data, control)
        if store is None:
            if directory is not None and not create and not await asyncio.to_thread(directory.has_control_db):
                raise unknown_provider(options.name, data, ())  # to open the control store would make it
            store = await stores.open(directory.control_db if directory else "memory", timeout_s=timeout_s)
            stack.push_async_callback(store.aclose)
        if not create:
            await check_known(store, options.name, data)
        parts = await _open_queues(directory, store, options, leased=leased)
        stack.pop_all()
        return parts


async def _open_queues(
    directory: DataDirectory | None, store: ControlStore, options: ProviderOptions, *, leased: bool
) -> ProviderParts:
    known = {record.name: record for record in await store.providers()}.get(options.name)
    adapter_name = options.adapter or (known.adapter if known else DEFAULT_ADAPTER)
    default = known.queues if known else DEFAULT_QUEUES
    ring = StreamQueueMapper(default if options.queues is None else options.queues)
    options.cache.per_queue(ring.queues)

    async def register(mapper: str, location: Mapping[str, Any] | None = None) -> None:
        await store.register_provider(
            options.name, adapter=adapter_name, queues=ring.queues, mapper=mapper, options=location
        )

    if known:
        await register(known.mapper)  # refuses options that contradict the stored ones
        await check_same_directory(store, options.name, directory)
    own = await asyncio.to_thread(directory.provider_dir, options.name) if directory else None
    owner = "" if store.private else await store.value_or(f"owner/{options.name}", uuid.uuid4().hex)
    context = AdapterContext(
        provider=options.name, queues=ring.queues, directory=own, queue_of=ring.queue_of, owner=owner,
        used_before=known is not None, location=known.options if known else {},
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        adapter = await open_adapter(adapter_name, context, options.options)
        stack.push_async_callback(adapter.aclose)
        if leased:
            _check_shareable(options.name, adapter_name, adapter)
        if options.delays is not None:
            check_delays_possible(options.name, adapter_name, adapter, private=store.private)
        mapper = adapter.mapper or ring
        if known and known.mapper != mapper.name:
            await register(mapper.name)  # refuses it
        await check_queues(store, options.name, adapter, ring.queues, directory, known=known is not None)
        if not known or adapter.location != known.options:
            await register(mapper.name, adapter.location)  # only now: a provider that cannot be opened is not stored
        delays = await _with_delays(options, adapter, store)
        stack.pop_all()
        origin = owner or uuid.uuid4().hex
        return ProviderParts(options, adapter_name, directory, store, delays or adapter, mapper, leased, delays, origin)


async def _with_delays(options: ProviderOptions, adapter: QueueAdapter, store: ControlStore) -> DelayingAdapter | None:
    """Decorate the adapter if the provider delays, or if delayed events are left from a time when it did."""
    delay_store = store.delay_store()
    if options.delays is None:
        if not adapter.capabilities.idempotent or await delay_store.due_in_s(options.name, "") is None:
            return None
        log.info("provider %r publishes events that were delayed before its option `delays` was removed", options.name)
    return DelayingAdapter(adapter, delay_store, options.name)


def _check_shareable(provider: str, name: str, adapter: QueueAdapter) -> None:
    if not adapter.capabilities.durable:
        raise NotSupported(
            f"provider {provider!r}: the queues of the adapter {name!r} are one process's own, so a cluster cannot "
            "share them: choose another adapter, or leave out [cluster]"
        )
