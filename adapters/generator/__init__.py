"""Adapter `generator`: generates events instead of reading a queue, for tests and load."""

from .adapter import GeneratorAdapter, open_adapter
from .options import GeneratorOptions
from .plan import POISON

__all__ = ("POISON", "GeneratorAdapter", "GeneratorOptions", "open_adapter")
