"""Providers in web frameworks. See docs/frameworks.md.

`headrace.frameworks.django_tasks` is a backend for Django's tasks; it needs Django.
"""

from .asgi import AppProvider as AppProvider
from .asgi import lifespan as lifespan

__all__ = ("AppProvider", "lifespan")
