"""Decides what belongs where: streams to queues (the mapper), and queues to silos or members of a group."""

from .allocation import average_allocation, sticky_allocation
from .balancers import average, balancer_names, best_fit_fixed, best_fit_live, find_balancer, lease_count, ring, static
from .mapper import StreamQueueMapper
from .maturity import Standing, standing
from .placement import Balancer, Placement, homes

__all__ = (
    "Balancer",
    "Placement",
    "Standing",
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
    "standing",
    "static",
    "sticky_allocation",
)
