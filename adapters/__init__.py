"""Queue technologies behind one seam. See `seam` for the contract and `conformance` for its tests."""

from .receiving import Bounds, Gap, QueueReceiver, Received
from .registry import adapter_names, open_adapter, read_options
from .seam import (
    AdapterContext,
    AdapterFactory,
    Backlog,
    Capabilities,
    ProducerSequence,
    QueueAdapter,
    QueueStatistics,
    Receipt,
    StreamMapper,
)

__all__ = (
    "AdapterContext",
    "AdapterFactory",
    "Backlog",
    "Bounds",
    "Capabilities",
    "Gap",
    "ProducerSequence",
    "QueueAdapter",
    "QueueReceiver",
    "QueueStatistics",
    "Receipt",
    "Received",
    "StreamMapper",
    "adapter_names",
    "open_adapter",
    "read_options",
)
