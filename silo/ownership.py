"""Check that the queues of a provider belong to its control store, which has the positions in them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from ..adapters import QueueAdapter
from ..store.control_store import ControlStore
from ..store.datadir import DataDirectory
from ..streams.errors import DataDirectoryError, NotFound
from ..streams.remedies import remedy


def identity_key(provider: str) -> str:
    """Key of the control store's entry that has the identity of the provider's queues."""
    return f"queues/{provider}"


async def check_known(store: ControlStore, provider: str, data: str | os.PathLike[str] | None) -> None:
    """Raise NotFound if the control store does not know the provider."""
    names = [record.name for record in await store.providers()]
    if provider not in names:
        raise unknown_provider(provider, data, names)


def unknown_provider(provider: str, data: str | os.PathLike[str] | None, names: Sequence[str]) -> NotFound:
    """Return the error for a provider that is none of `names`."""
    return NotFound(f"data directory {str(data)!r} has no provider {provider!r}: there is {', '.join(names) or 'none'}")


async def check_queues(
    store: ControlStore, provider: str, adapter: QueueAdapter, queues: int, directory: DataDirectory | None, *,
    known: bool,
) -> None:  # fmt: skip
    """Raise DataDirectoryError if the control store belongs to other queues than those that the adapter has opened.

    `known`: the control store knows the provider. The first call notes the queues in the control store.
    """
    if directory is not None and directory.id and await asyncio.to_thread(_has_files, directory, provider):
        await store.value_or(f"directory/{provider}", directory.id)
        await check_same_directory(store, provider, directory)
    if not adapter.identity:
        return
    if not known and adapter.mapper is None:  # other programs write to queues with a mapper of their own
        await _check_unused(store, provider, adapter, queues, None if directory is None else directory.path)
    if await store.value_or(identity_key(provider), adapter.identity) != adapter.identity:
        raise DataDirectoryError(
            f"provider {provider!r}: its log is not the one that its control store belongs to, but from another data "
            "directory, or older: put back the right one; docs/damage.md says what else can be done"
        )


def _has_files(directory: DataDirectory, provider: str) -> bool:
    return any(directory.provider_dir(provider).iterdir())


async def check_same_directory(store: ControlStore, provider: str, directory: DataDirectory | None) -> None:
    """Raise DataDirectoryError if the queues of a provider are kept in another data directory.

    Queues in a data directory belong to its machine. Positions in the queues of one machine would be taken for
    positions in those of another.
    """
    if directory is None or not directory.id:
        return
    if await store.value(f"directory/{provider}") not in (None, directory.id):
        raise DataDirectoryError(
            f"provider {provider!r}: its queues are in the data directory of another machine, not in {directory.path}, "
            "and its control data belongs to those: silos on several machines need an adapter whose queues all of them "
            "reach"
        )


async def check_moved_store(store: ControlStore, directory: DataDirectory) -> None:
    """Raise DataDirectoryError if a control store does not know the queues of a data directory."""
    there = {record.name for record in await store.providers()}
    stored = [path.name for path in sorted((directory.path / "providers").glob("*")) if any(path.iterdir())]
    known = [provider for provider in stored if await store.value(f"directory/{provider}") == directory.id]
    if not there or known != stored:
        raise DataDirectoryError(
            f"data directory '{directory.path}': the database there has other control data, which does not know "
            f"{', '.join(stored) or 'any provider'}: name the database that was moved, or a copy of it"
        )


async def _check_unused(
    store: ControlStore, provider: str, adapter: QueueAdapter, queues: int, data: Path | None
) -> None:
    """Raise DataDirectoryError if a control store that does not know the provider meets queues that were in use.

    A process that was killed while it made the provider leaves empty queues.
    """
    if await store.value(identity_key(provider)) is not None:
        return
    for queue in range(queues):
        if not (await adapter.bounds(queue)).next:
            continue
        if adapter.other_queues:
            raise DataDirectoryError(
                f"provider {provider!r}: its queues have events of another data directory or control store, or the "
                f"control data of this one was lost: {adapter.other_queues}; or restore the control data from a backup"
            )
        raise DataDirectoryError(
            f"provider {provider!r} has events, but its control store does not know it: the control data was lost: "
            f"restore it from a backup, or make it anew with {remedy('repair control', data=data)}"
        )
