"""Adapter `memory`: queues in the memory of one process, bounded, with independent positions per group."""

from .adapter import MemoryAdapter, MemoryOptions, open_adapter

__all__ = ("MemoryAdapter", "MemoryOptions", "open_adapter")
