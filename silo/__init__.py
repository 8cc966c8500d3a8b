"""Where it is put together: the provider, the silo process, the command line."""

from .provider import CacheOptions, Provider, ProviderOptions, Subscription
from .views import ProviderStatistics

__all__ = ("CacheOptions", "Provider", "ProviderOptions", "ProviderStatistics", "Subscription")
