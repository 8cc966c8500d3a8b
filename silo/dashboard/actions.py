"""Changes that a viewer with a token may make, if the token may manage. The services check the permissions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from ...streams.errors import InvalidArgument
from ..local import InProcessTransport
from .calls import ServiceCalls
from .letters import LetterFilter, ids_of

_T = TypeVar("_T")


class _Letters(msgspec.Struct, forbid_unknown_fields=True):
    """Dead letters: those of `ids`, or all that match."""

    provider: str
    ids: dict[str, list[int]] | None = None
    """By subscription. None: all that match `subscription` and `text`."""
    subscription: str = ""
    text: str = ""


class _Stream(msgspec.Struct, forbid_unknown_fields=True):
    provider: str
    subscription: str
    namespace: str
    key: str


async def _redrive(transport: InProcessTransport, options: Mapping[str, Any]) -> dict[str, int]:
    calls, wanted = ServiceCalls(transport), _read(_Letters, options)
    by_name = await _ids(calls, wanted)
    return {"count": sum([await calls.redrive(wanted.provider, name, ids) for name, ids in by_name.items()])}


async def _discard(transport: InProcessTransport, options: Mapping[str, Any]) -> dict[str, int]:
    calls, wanted = ServiceCalls(transport), _read(_Letters, options)
    by_name = await _ids(calls, wanted)
    return {"count": sum([await calls.discard(wanted.provider, name, ids) for name, ids in by_name.items()])}


async def _resume(transport: InProcessTransport, options: Mapping[str, Any]) -> dict[str, int]:
    stream = _read(_Stream, options)
    resumed = await ServiceCalls(transport).resume(stream.provider, stream.subscription, stream.namespace, stream.key)
    return {"count": int(resumed)}


Action = Callable[[InProcessTransport, Mapping[str, Any]], Awaitable[dict[str, int]]]
ACTIONS: Mapping[str, Action] = {"redrive": _redrive, "discard": _discard, "resume": _resume}
"""By name. Each returns how many things it has changed."""


async def _ids(calls: ServiceCalls, wanted: _Letters) -> dict[str, list[int]]:
    """Only named ids: for the services, no id at all means all dead letters."""
    found = wanted.ids
    if found is None:
        found = await ids_of(calls, LetterFilter(wanted.provider, wanted.subscription, wanted.text))
    return {name: ids for name, ids in found.items() if ids}


def _read(kind: type[_T], options: Mapping[str, Any]) -> _T:
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"the action's options are wrong: {error}") from None
