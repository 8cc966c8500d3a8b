"""What requests name: providers and subscriptions, found only for who may know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...streams.errors import DefinitionConflict, NotFound
from ...streams.subscriptions import SubscriptionDefinition
from ..access import Permission
from ..provider import Provider
from .guard import Call

Providers = Mapping[str, Provider]
"""The silo's providers, by name."""

TO_PUBLISH = (Permission.PUBLISH,)
TO_CONSUME = (Permission.SUBSCRIBE,)
TO_MANAGE = (Permission.MANAGE,)
TO_KNOW = (Permission.SUBSCRIBE, Permission.MANAGE)


def provider_of(call: Call, providers: Providers, name: str, permissions: Sequence[Permission]) -> Provider:
    """The provider that a request names, "" being "default", for a caller with one of `permissions` somewhere.

    Raises PermissionDenied where it has none, whether there is such a provider or not; NotFound.
    """
    call.principal.require_somewhere(*permissions)
    provider = providers.get(name or "default")
    if provider is None:
        raise NotFound(f"this silo has no provider {name or 'default'!r}: name one of its configuration")
    return provider


async def subscription_of(
    call: Call, provider: Provider, name: str, permissions: tuple[Permission, ...]
) -> SubscriptionDefinition:
    """A subscription by its name, for a caller with one of `permissions` on all that it selects.

    Raises PermissionDenied where the caller has none, in the same words where there is no such subscription; NotFound
    only where the caller may know that.
    """
    definition = await _stored(provider, name)
    try:
        call.principal.require_subscription(permissions, name, definition and definition.selector.pattern)
    except NotFound:  # in the words of the store
        raise NotFound(f"provider {provider.name!r} has no subscription {name!r}") from None
    assert definition is not None
    return definition


async def create_subscription(call: Call, provider: Provider, definition: SubscriptionDefinition) -> bool:
    """Create a subscription for a caller who may subscribe to what it selects, or manage it. False where it exists.

    Raises DefinitionConflict where it exists otherwise and the caller may know that one, else PermissionDenied.
    """
    selector = definition.selector.pattern
    if not call.principal.allows_selector(Permission.MANAGE, selector):
        call.principal.require_selector(Permission.SUBSCRIBE, selector)
    try:
        return await provider.create_subscription(definition)
    except DefinitionConflict:
        await subscription_of(call, provider, definition.name, TO_KNOW)
        raise


async def _stored(provider: Provider, name: str) -> SubscriptionDefinition | None:
    try:
        return await provider.store.subscription(provider.name, name)
    except NotFound:
        return None
