"""Decides what belongs where: streams to queues (the mapper), and queues to silos or members of a group."""

from .allocation import average_allocation, sticky_allocation
from .mapper import StreamQueueMapper

__all__ = ("StreamQueueMapper", "average_allocation", "sticky_allocation")
