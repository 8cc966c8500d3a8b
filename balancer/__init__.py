"""Assigns streams to queues (the mapper), and queues to silos or to members of a group."""

from .allocation import average_allocation, sticky_allocation
from .balancers import average, balancer_names, best_fit_fixed, best_fit_live, find_balancer, lease_count, ring, static
from .mapper import StreamQueueMapper
from .placement import Balancer, Placement, homes

__all__ = (
    "Balancer",
    "Placement",
    "StreamQueueMapper",
    "average",
    "average_allocation",
    "balancer_names",
    "best_fit_fixed",
    "best_fit_live",
    "find_balancer",
    "homes",
    "lease_count",
    "ring",
    "static",
    "sticky_allocation",
)
