"""Pulling agents: queues are read into caches and delivered through cursors."""

from .agent import AgentStatistics, CacheLimits, PullingAgent
from .cache import EMPTY, BucketStatistics, CacheStatistics, Cursor, Empty, QueueCache
from .delivery import Delivery, DeliveryStatistics
from .edge import Edge
from .group import Group, taken_over
from .handling import HandlerDelivery
from .manager import HandlerService, PullingManager, Service
from .member import Events, Member, MemberStatistics
from .parcel import Parcel

__all__ = (
    "EMPTY",
    "AgentStatistics",
    "BucketStatistics",
    "CacheLimits",
    "CacheStatistics",
    "Cursor",
    "Delivery",
    "DeliveryStatistics",
    "Edge",
    "Empty",
    "Events",
    "Group",
    "HandlerDelivery",
    "HandlerService",
    "Member",
    "MemberStatistics",
    "Parcel",
    "PullingAgent",
    "PullingManager",
    "QueueCache",
    "Service",
    "taken_over",
)
