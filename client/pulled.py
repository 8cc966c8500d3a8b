"""The result of a pull."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from ..proto.v1 import consumer_pb2 as pb
from ..streams import wire
from ..streams.frames import split
from ..streams.transactions import ProviderOrigin
from .holdings import ConsumerHoldings
from .management import parsed
from .received import ReceivedBatch


class Pulled(Sequence[ReceivedBatch]):
    """The batches that one `pull` returned. Acknowledge or reject them, and then call `client.acknowledge`."""

    def __init__(self, name: str, consumer: str, answer: bytes, provider: str) -> None:
        self.name = name
        self.consumer = consumer
        delivered, rest = split(answer)
        response = parsed(pb.PullResponse, rest)
        self.gaps = [wire.gap_of(gap, provider, name) for gap in response.gaps]
        """Events that the subscription did not get."""
        self.refused = len(response.refused)
        """How many reports with the call came too late, as in `Client.acknowledge`."""
        self._holdings = ConsumerHoldings()
        self._holdings.account.origin = ProviderOrigin("", provider, name, shared=True)
        for status in response.queues:
            self._holdings.serve(self, status)
        self._holdings.receive(self, delivered, 0)
        self._batches = list(iter(self._holdings.take, None))

    def __repr__(self) -> str:
        return f"Pulled({self.name!r}, {self.consumer!r}, {self._batches!r})"

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> ReceivedBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ReceivedBatch]: ...
    def __getitem__(self, index: int | slice) -> ReceivedBatch | Sequence[ReceivedBatch]:
        return self._batches[index]

    def wake(self) -> None:
        """Reports wait until the next call (`ReportLink`)."""

    def reports(self) -> list[pb.QueueReport]:
        """Return the results of the batches since the last time."""
        return [report for request in iter(lambda: self._holdings.request(self), None) for report in request.reports]
