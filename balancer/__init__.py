"""Decides what belongs where: streams to queues (the mapper), and queues to silos."""

from .mapper import StreamQueueMapper

__all__ = ("StreamQueueMapper",)
