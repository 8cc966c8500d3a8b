"""Export of a provider's metrics to a registry of the user's program."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..streams.background import BackgroundTasks
from ..streams.errors import Closed, InvalidArgument
from .lag_history import LagHistory
from .opening import ProviderParts
from .provider_core import ProviderCore

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class MeasuredProvider(ProviderCore):
    """An open provider whose metrics can be registered."""

    def __init__(self, parts: ProviderParts) -> None:
        super().__init__(parts)
        self._measuring = BackgroundTasks()
        self._end_metrics: Callable[[], None] | None = None
        """Ends what `register_metrics` began."""

    def register_metrics(self, registry: CollectorRegistry | None = None) -> None:
        """Show the metrics of this provider in a registry of `prometheus_client` until the provider is closed. None:
        the default registry. Providers with different names may share one. The lag is measured every two seconds.

        Raises InvalidArgument if they are shown already, or another provider of this name is; Closed.
        """
        from prometheus_client import REGISTRY  # noqa: PLC0415 (it takes long to import, and is needed only here)

        from .metrics import show  # noqa: PLC0415

        if self._closing is not None:
            raise Closed(f"provider {self.name!r} is closed")
        if self._end_metrics is not None:
            raise InvalidArgument(f"the metrics of provider {self.name!r} are registered already")
        history = LagHistory({self.name: self})
        self._end_metrics = show(self, history, registry or REGISTRY)
        self._measuring.start(history.run(), f"headrace lag history {self.name}")

    async def _close(self, drain_s: float) -> None:
        if self._end_metrics is not None:
            self._end_metrics()
        await self._measuring.aclose()
        await super()._close(drain_s)
