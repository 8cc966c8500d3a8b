"""Everything that a silo offers to programs of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..consumers import Consumers
from . import publisher
from .consumer import ConsumerService
from .guard import Method
from .lookup import Providers
from .subscriptions import SubscriptionService


def methods_of(providers: Providers, consumers: Mapping[str, Consumers]) -> Sequence[Method]:
    return [
        *publisher.methods(providers),
        *ConsumerService(providers, consumers).methods(),
        *SubscriptionService(providers, consumers).methods(),
    ]
