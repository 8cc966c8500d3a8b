"""Adapter `memory`: queues in the memory of one process, bounded, with independent positions per group."""

from .adapter import DEFAULT_GROUP, MemoryAdapter, MemoryOptions, open_adapter

__all__ = ("DEFAULT_GROUP", "MemoryAdapter", "MemoryOptions", "open_adapter")
