"""Pulling agents: queues are read into caches and delivered through cursors."""

from .agent import AgentStatistics, CacheLimits, PullingAgent
from .cache import EMPTY, BucketStatistics, CacheStatistics, Cursor, Empty, QueueCache
from .delivery import Delivery, DeliveryStatistics
from .handling import HandlerDelivery
from .manager import HandlerService, PullingManager, Service

__all__ = (
    "EMPTY",
    "AgentStatistics",
    "BucketStatistics",
    "CacheLimits",
    "CacheStatistics",
    "Cursor",
    "Delivery",
    "DeliveryStatistics",
    "Empty",
    "HandlerDelivery",
    "HandlerService",
    "PullingAgent",
    "PullingManager",
    "QueueCache",
    "Service",
)
