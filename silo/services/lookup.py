"""Look up the providers and subscriptions that requests name, for callers with a permission on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...server.access import Permission
from ...server.methods import ServiceCall
from ...streams.errors import DefinitionConflict, NotFound, PermissionDenied
from ...streams.subscriptions import SlowConsumer, SubscriptionDefinition
from ..provider_core import ProviderCore
from .visible import VisibleBounds, sees_everything

Providers = Mapping[str, ProviderCore]
"""The silo's providers, by name."""

TO_PUBLISH = (Permission.PUBLISH,)
TO_CONSUME = (Permission.SUBSCRIBE,)
TO_MANAGE = (Permission.MANAGE,)
TO_KNOW = (Permission.SUBSCRIBE, Permission.MANAGE)


def provider_of(call: ServiceCall, providers: Providers, name: str, permissions: Sequence[Permission]) -> ProviderCore:
    """Return the provider that a request names; "" is "default". The caller needs one of `permissions`.

    Raises PermissionDenied without a permission, whether the provider exists or not; NotFound.
    """
    call.principal.require_somewhere(*permissions)
    provider = providers.get(name or "default")
    if provider is None:
        raise NotFound(f"this silo has no provider {name or 'default'!r}: name one of its configuration")
    return provider


async def subscription_of(
    call: ServiceCall, provider: ProviderCore, name: str, permissions: tuple[Permission, ...]
) -> SubscriptionDefinition:
    """Return a stored subscription. Raises as `require_subscription` does."""
    return require_subscription(call, provider, name, permissions, await stored_definition(provider, name))


def require_subscription(
    call: ServiceCall,
    provider: ProviderCore,
    name: str,
    permissions: tuple[Permission, ...],
    definition: SubscriptionDefinition | None,
) -> SubscriptionDefinition:
    """Return the definition of a subscription. The caller needs one of `permissions` on all streams that it selects.

    Raises PermissionDenied without a permission, with the same text if there is no subscription. Raises NotFound only
    if the caller may know all names.
    """
    try:
        call.principal.require_subscription(permissions, name, definition and definition.selector.pattern)
    except NotFound:  # in the words of the store
        raise NotFound(f"provider {provider.name!r} has no subscription {name!r}") from None
    assert definition is not None
    return definition


async def create_subscription(
    call: ServiceCall, provider: ProviderCore, definition: SubscriptionDefinition, visible: VisibleBounds
) -> bool:
    """Create a subscription. Return False if an equal one exists.

    The caller needs `subscribe` or `manage` on all streams that it selects, and on all streams if the subscription
    throttles: then its consumers decide how fast the queues are read, which have streams of others, too.

    If one with another definition exists: raises DefinitionConflict if the caller may know it, else PermissionDenied.
    """
    selector = definition.selector.pattern
    if not call.principal.allows_selector(Permission.MANAGE, selector):
        call.principal.require_selector(Permission.SUBSCRIBE, selector)
    rewindable = provider.adapter.capabilities.rewindable  # else all subscriptions throttle
    if rewindable and definition.slow_consumer is SlowConsumer.THROTTLE and not sees_everything(call.principal):
        if await stored_definition(provider, definition.name) == definition:
            return False
        raise PermissionDenied(
            f"subscription {definition.name!r}: with slow_consumer = throttle, its consumers can stop the queues for "
            "all clients: that needs the permission to subscribe to or manage */*; use detach, the default"
        )
    await visible.check_start(call.principal, provider, definition.selector, definition.start)
    try:
        return await provider.create_subscription(definition)
    except DefinitionConflict:
        try:
            await subscription_of(call, provider, definition.name, TO_KNOW)
        except PermissionDenied:
            raise PermissionDenied(
                f"the name {definition.name!r} is taken by a subscription that this client may not use: choose another"
            ) from None
        raise


async def stored_definition(provider: ProviderCore, name: str) -> SubscriptionDefinition | None:
    """Return the definition of a subscription in the store; None if there is none."""
    try:
        return await provider.store.subscription(provider.name, name)
    except NotFound:
        return None
