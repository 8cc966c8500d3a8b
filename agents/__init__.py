"""Pulling agents: queues are read into caches and delivered through cursors."""

from .agent import AgentStatistics, PullingAgent
from .cache import EMPTY, BucketStatistics, CacheLimits, CacheStatistics, Cursor, Empty, QueueCache
from .counts import DeliveryCounts
from .cursor import CursorState
from .delivery.delivery import Delivery, DeliveryStatistics
from .delivery.edge import Edge
from .delivery.group import Group, taken_over
from .delivery.handling import HandlerDelivery
from .delivery.member import EventRange, Member, MemberStatistics
from .delivery.parcel import Parcel
from .delivery.unsent import SendAccount, SendBudget
from .effects_service import EffectsService
from .manager import PullingManager
from .served import DeliveryService, HandlerService, ServedSubscription

__all__ = (
    "EMPTY",
    "AgentStatistics",
    "BucketStatistics",
    "CacheLimits",
    "CacheStatistics",
    "Cursor",
    "CursorState",
    "Delivery",
    "DeliveryCounts",
    "DeliveryService",
    "DeliveryStatistics",
    "Edge",
    "EffectsService",
    "Empty",
    "EventRange",
    "Group",
    "HandlerDelivery",
    "HandlerService",
    "Member",
    "MemberStatistics",
    "Parcel",
    "PullingAgent",
    "PullingManager",
    "QueueCache",
    "SendAccount",
    "SendBudget",
    "ServedSubscription",
    "taken_over",
)
