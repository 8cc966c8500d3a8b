"""A consumer, as its router sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..proto.v1 import consumer_pb2 as pb
from ..streams.frames import DeliveredBatch
from .holdings import ConsumerHoldings
from .links import ENDED, LinkUser, QueueStatus, SiloLink


class ConsumerLinks(LinkUser):
    """Passes everything that sessions deliver to `holdings`, and notifies the consumer."""

    def __init__(
        self,
        holdings: ConsumerHoldings,
        opening: Callable[[], pb.Open],
        on_opened: Callable[[pb.Opened], None],
        *,
        on_batches: Callable[[], None],
        on_response: Callable[[pb.SubscribeResponse], None],
        on_change: Callable[[], None],
    ) -> None:
        self._holdings = holdings
        self._opening = opening
        self._on_opened = on_opened
        self._on_batches = on_batches
        self._on_response = on_response
        self._on_change = on_change

    def open(self) -> pb.Open:
        return self._opening()

    def opened(self, link: SiloLink, opened: pb.Opened) -> None:
        self._on_opened(opened)

    def changed(self, link: SiloLink, status: QueueStatus) -> None:
        if status.state == ENDED:
            self._holdings.end(link, status.queue)
        else:
            self._holdings.serve(link, status)
        self._on_change()

    def request(self, link: SiloLink) -> pb.SubscribeRequest | None:
        return self._holdings.request(link)

    def take(self, link: SiloLink, delivered: Sequence[DeliveredBatch], frames: bytes) -> None:
        self._holdings.receive(link, delivered, len(frames))
        self._on_batches()

    def handle_response(self, link: SiloLink, response: pb.SubscribeResponse) -> None:
        for refusal in response.refused:
            self._holdings.refused(link, refusal)
        for saved in response.saved:
            self._holdings.saved(link, saved)
        if response.HasField("progress"):
            progress = response.progress
            self._holdings.progressed(link, progress.needed_bytes, caught_up=progress.caught_up)
        self._on_response(response)

    def ended(self, link: SiloLink) -> None:
        self._on_change()
