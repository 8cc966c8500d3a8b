"""Queue technologies behind one seam. See `seam` for the contract and `conformance` for its tests."""

from .registry import adapter_names, open_adapter, read_options
from .seam import (
    AdapterContext,
    AdapterFactory,
    Backlog,
    Bounds,
    Capabilities,
    Direction,
    Gap,
    ProducerSequence,
    QueueAdapter,
    QueueReceiver,
    QueueStatistics,
    Receipt,
    Received,
)

__all__ = (
    "AdapterContext",
    "AdapterFactory",
    "Backlog",
    "Bounds",
    "Capabilities",
    "Direction",
    "Gap",
    "ProducerSequence",
    "QueueAdapter",
    "QueueReceiver",
    "QueueStatistics",
    "Receipt",
    "Received",
    "adapter_names",
    "open_adapter",
    "read_options",
)
