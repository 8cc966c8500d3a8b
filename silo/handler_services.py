"""Services of the handlers in this process."""

from __future__ import annotations

from functools import partial

from ..agents import EffectsService, HandlerService
from ..streams.codecs import Codecs
from ..streams.handlers import Handler, SubscriptionDeclaration, handler_with_transaction
from .opening import ProviderParts


async def handler_service(declared: SubscriptionDeclaration, parts: ProviderParts, codecs: Codecs) -> HandlerService:
    """Return the service of a handler. Raises the errors of `HandlerEffects.check`."""
    if declared.effects is None:
        handler = Handler.of(declared.handler, batch=declared.batch, codecs=codecs)
        return HandlerService(handler, declared.filter, declared.concurrency, provider=declared.provider)
    declared.check_handler()
    await declared.effects.check()
    handler = handler_with_transaction(declared.handler, codecs, batch=declared.batch)
    return EffectsService(
        handler,
        declared.filter,
        declared.concurrency,
        declared.effects,
        parts.origin,
        provider=declared.provider,
        batch=declared.batch,
        queues=parts.adapter.mapper,
        current_generation=partial(parts.store.generation, declared.provider, declared.definition.name),
    )
