"""The requests of an idempotent producer: in flight, to be sent again, and the next one. No I/O.

Publications are cut into pieces, which are packed into requests. Each request has a number, and names the number before
it. With these the silo stores nothing twice, and refuses a request that would leave a hole. Several requests are in
flight at a time, and they are answered in order.

When a request fails, the later ones fail too, because they follow it. No new request is sent until all requests in
flight are answered. Then a new round begins (go-back-N):

- after a retryable failure, or a lost connection, the same requests are sent again under their numbers;
- a refused request is cut in two, until the publication that the silo refuses is alone and fails by itself. It was not
  stored, so the requests after it were not stored either, and get new numbers.

A request is not sent again if no caller waits for it any more. It may be stored already, so the next request has to
find the number that it follows: it tries the last number known to be stored, then the numbers that may be stored. If
the silo does not know the producer, the numbers begin anew. That happens after weeks without events, or if the queues
do not survive the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ..streams.errors import HeadraceError, NotFound, NotSupported, QueueFull, SequenceConflict, Unauthenticated
from ..streams.publishing import Receipt


class WindowLimits(NamedTuple):
    """Limits of one request, and of all requests in flight."""

    request_bytes: int = 1 << 20
    """Most bytes of a request; a single batch may have more."""
    request_batches: int = 1024
    requests: int = 32
    """Most requests in flight: sent, and not answered."""
    bytes: int = 8 << 20
    """Most bytes in flight."""
    small_bytes: int = 32 << 10
    """Smaller requests wait for more events while another one is in flight: see `PublishWindow.should_gather`."""


class Publication:
    """The events of one caller's publish. It is `over` when it is settled, or when its caller does not wait any
    more."""

    __slots__ = ("error", "over", "pieces", "receipts")

    def __init__(self) -> None:
        self.pieces = 0
        """Number of pieces that are not stored yet."""
        self.receipts: list[Receipt] = []
        self.error: HeadraceError | None = None
        self.over = False

    def settled(self) -> None:
        """Called once, when it is `over`: stored, or failed with `error`."""

    def fail(self, error: HeadraceError) -> None:
        if not self.over:
            self.error = error
            self.over = True
            self.settled()

    def store(self, receipts: Sequence[Receipt]) -> None:
        """One of its pieces is stored."""
        self.receipts += receipts
        self.pieces -= 1
        if not self.pieces and not self.over:
            self.over = True
            self.settled()


class PublicationPiece:
    """Consecutive batches of a publication that travel together. `frames` are their encoded bytes."""

    __slots__ = ("batches", "frames", "publication", "size")

    def __init__(self, publication: Publication, frames: Sequence[bytes], batches: int, size: int) -> None:
        self.publication = publication
        self.frames = frames
        self.batches = batches
        self.size = size


class WindowedRequest:
    """Pieces that are stored together or not at all. `number` is 0 until it is sent."""

    __slots__ = ("failure", "maybe_stored", "number", "pieces", "previous", "size")

    def __init__(self, pieces: list[PublicationPiece]) -> None:
        self.pieces = pieces
        self.size = sum([piece.size for piece in pieces])
        self.number = 0
        self.previous = 0
        self.maybe_stored = False
        """Whether it was sent, and may be stored or not."""
        self.failure: HeadraceError | None = None
        """Its answer in this round."""


class RequestNumbers:
    """The numbers of a producer's requests, and the last one that the silo has stored, as far as the client knows.

    `new_producer` makes the producer's id, and a new id if the silo's numbers do not match.
    """

    def __init__(self, new_producer: Callable[[], str]) -> None:
        self.producer = new_producer()
        self._new_producer = new_producer
        self._last = 0
        self._stored = 0
        self._maybe_stored: list[int] = []
        self._guesses = 0

    def new(self) -> int:
        self._last += 1
        return self._last

    def last_stored(self) -> int:
        """The present guess."""
        return self._candidates()[self._guesses]

    def _candidates(self) -> list[int]:
        """Possible values of the last number that the silo stored, most likely first."""
        return list(dict.fromkeys([self._stored, *reversed(self._maybe_stored), 0]))

    def stored(self, number: int) -> None:
        """The silo has stored the request with this number."""
        self._stored = number
        self._maybe_stored.clear()
        self._guesses = 0

    def abandoned(self, request: WindowedRequest) -> None:
        """A request is given up. Keep its number if it may be stored."""
        if request.maybe_stored:
            self._maybe_stored.append(request.number)
            self._guesses = 0

    def reconnected(self) -> None:
        """Begin with the most likely guess."""
        self._guesses = 0

    def guess_again(self) -> bool:
        """The present guess is wrong: try the next one. Return False if there is none."""
        self._guesses += 1
        return self._guesses < len(self._candidates())

    def begin_anew(self) -> None:
        """Continue as another producer."""
        self.producer = self._new_producer()
        self.stored(0)


class HeldPieces:
    """The pieces that wait for a request, and the size of all pieces that a window holds."""

    def __init__(self) -> None:
        self.waiting: deque[PublicationPiece] = deque()
        self.size = 0
        """Bytes of all requests and waiting pieces."""
        self.count = 0
        """Number of pieces in all requests, and of waiting pieces."""

    def add(self, piece: PublicationPiece) -> None:
        piece.publication.pieces += 1
        self.waiting.append(piece)
        self.size += piece.size
        self.count += 1

    def forget(self, piece: PublicationPiece) -> None:
        self.size -= piece.size
        self.count -= 1

    def store(self, request: WindowedRequest, receipts: Sequence[Receipt]) -> None:
        """Settle the pieces of a request that is stored."""
        at = 0
        for piece in request.pieces:
            end = at + piece.batches
            piece.publication.store(receipts[at:end])
            at = end
        self.size -= request.size
        self.count -= len(request.pieces)

    def fail(self, pieces: Iterable[PublicationPiece], failure: HeadraceError) -> None:
        for piece in pieces:
            self.forget(piece)
            piece.publication.fail(failure)

    def pack(self, limits: WindowLimits) -> WindowedRequest | None:
        """Put as many waiting pieces as fit into one request."""
        waiting = self.waiting
        pieces: list[PublicationPiece] = []
        size = batches = 0
        while waiting:
            piece = waiting[0]
            if piece.publication.over:
                self.forget(waiting.popleft())
                continue
            size += piece.size
            batches += piece.batches
            if pieces and (size > limits.request_bytes or batches > limits.request_batches):
                break
            pieces.append(waiting.popleft())
        return WindowedRequest(pieces) if pieces else None

    def without_abandoned(self, request: WindowedRequest) -> WindowedRequest | None:
        """A new request with the pieces whose callers still wait; None if there are none."""
        live: list[PublicationPiece] = []
        for piece in request.pieces:
            if piece.publication.over:
                self.forget(piece)
            else:
                live.append(piece)
        return WindowedRequest(live) if live else None


class PublishWindow:
    """The requests of one producer."""

    def __init__(self, new_producer: Callable[[], str], limits: WindowLimits | None = None) -> None:
        """`new_producer` makes the ids of `RequestNumbers`."""
        self.limits = limits or WindowLimits()
        self.failed_rounds = 0
        """Rounds in a row with a retryable failure: wait before the next."""
        self.trouble: HeadraceError | None = None
        """The last retryable failure."""
        self._numbers = RequestNumbers(new_producer)
        self.held = HeldPieces()
        """The waiting pieces, and the size and number of all pieces. Only the window changes it."""
        # The requests, in their order: failed in this round; in flight; to be sent, or sent again.
        self._failed: list[WindowedRequest] = []
        self._in_flight: deque[WindowedRequest] = deque()
        self._resend: deque[WindowedRequest] = deque()
        self._in_flight_bytes = 0

    @property
    def producer(self) -> str:
        """The present id of the producer."""
        return self._numbers.producer

    @property
    def should_gather(self) -> bool:
        """Whether the next request should wait for more events: it is new and small, and another one is in flight.

        For a silo, a request costs more than a small event. While the silo is busy, events collect, and it gets fewer
        and larger requests. This is Nagle's algorithm (RFC 896), with `WindowLimits.small_bytes` for a full segment.
        """
        unsent = self.held.size - self._in_flight_bytes
        return 0 < unsent < self.limits.small_bytes and bool(self._in_flight) and not self._resend

    # ---- in and out --------------------------------------------------------------------------------------------------

    def add(self, piece: PublicationPiece) -> None:
        """Append a piece to the waiting ones."""
        self.held.add(piece)

    def take(self) -> WindowedRequest | None:
        """Return the next request to send, with its numbers; None if there is none now."""
        limits = self.limits
        if len(self._in_flight) >= limits.requests or self._in_flight_bytes >= limits.bytes:
            return None
        request = self._next()
        if request is None:
            return None
        request.previous = self._before()
        if not request.number:
            request.number = self._numbers.new()
        self._in_flight.append(request)
        self._in_flight_bytes += request.size
        return request

    def stored(self, receipts: Sequence[Receipt]) -> None:
        """Note that the first request in flight is stored, with one receipt for each of its batches."""
        request = self._answered()
        # The requests that it follows are stored as well, although their answers said that they failed.
        for earlier in self._failed:
            self.held.store(earlier, [Receipt(None, duplicate=True)] * _batches(earlier))
        self._failed.clear()
        self.held.store(request, receipts)
        self._numbers.stored(request.number)
        self.failed_rounds = 0
        self.trouble = None

    def failed(self, failure: HeadraceError) -> None:
        """Note that the first request in flight failed."""
        request = self._answered()
        request.failure = failure
        self._failed.append(request)
        if not self._in_flight and not self._must_probe():
            self._begin_round()

    def disconnected(self) -> None:
        """Note that the requests in flight will not be answered."""
        for request in self._in_flight:
            request.maybe_stored = True
        self._resend.extendleft(reversed(self._in_flight))
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self._numbers.reconnected()
        self._put_back()

    def fail_all(self, failure: HeadraceError) -> None:
        """Fail all publications. Call `disconnected` before."""
        self._give_up(failure)
        self.held.fail(self.held.waiting, failure)
        self.held.waiting.clear()

    @property
    def idle(self) -> bool:
        """Whether there is no request, and no waiting piece."""
        return not (self.held.waiting or self._resend or self._in_flight or self._failed)

    @property
    def in_flight(self) -> int:
        """Number of requests that are sent and not answered."""
        return len(self._in_flight)

    @property
    def batches_expected(self) -> int:
        """Number of receipts in the next answer."""
        return _batches(self._in_flight[0]) if self._in_flight else 0

    def sent(self) -> Iterator[Publication]:
        """Publications with a request that was sent, or will be sent at once, oldest first."""
        requests = chain(self._failed, self._in_flight, self._resend)
        return (piece.publication for request in requests for piece in request.pieces)

    def waiting(self) -> Iterator[Publication]:
        """Publications with a piece that was not sent yet, oldest first. The first may be in `sent`, too."""
        return (piece.publication for piece in self.held.waiting)

    # ---- the next request --------------------------------------------------------------------------------------------

    def _next(self) -> WindowedRequest | None:
        if self._failed:
            return self._resend.popleft() if self._must_probe() else None
        if not self._in_flight:
            self._drop_abandoned()
        while self._resend:
            request = self._resend.popleft()
            if request.number or (request := self.held.without_abandoned(request)):
                return request
        return self.held.pack(self.limits)

    def _before(self) -> int:
        """The number that the next request follows."""
        if self._in_flight:
            return self._in_flight[-1].number
        if self._failed:
            return self._failed[-1].number
        return self._numbers.last_stored()

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def _answered(self) -> WindowedRequest:
        request = self._in_flight.popleft()
        self._in_flight_bytes -= request.size
        return request

    def _must_probe(self) -> bool:
        """Whether to send requests of an earlier round again, after one before them was refused.

        They may be stored. They can get new numbers only after the silo has answered that they follow no stored one.
        """
        return bool(self._failed and self._resend) and _is_refused(self._failed[0]) and self._resend[0].number > 0

    def _begin_round(self) -> None:
        first, *others = self._failed
        if _is_conflicting(first):
            self._guess_again()
        elif _is_refused(first) and all(map(_is_not_stored, others)):
            self._cut()
        else:
            self.failed_rounds += 1
            self.trouble = next(request.failure for request in self._failed if not _is_not_stored(request))
            self._put_back()

    def _put_back(self) -> None:
        for request in self._failed:
            request.maybe_stored |= not _is_not_stored(request)
        self._resend.extendleft(reversed(self._failed))
        self._failed.clear()

    def _guess_again(self) -> None:
        """The last number that the silo stored was guessed wrong: try the next candidate."""
        self._put_back()
        if self._numbers.guess_again():
            return
        self._give_up(
            SequenceConflict(
                "the silo does not know which events of this client are stored: these may or may not be; read the "
                "streams, and publish the missing ones again"
            )
        )
        self._numbers.begin_anew()

    def _cut(self) -> None:
        """Cut each refused request in two, or fail it. The other requests get new numbers."""
        rebuilt: list[WindowedRequest] = []
        cut_maybe_stored = False
        for request in self._failed:
            # If a request that is cut turns out to be stored, no request may follow it or the later ones: its events
            # would be stored twice. Then the numbers of the silo do not match, and the callers get the error.
            request.maybe_stored &= not cut_maybe_stored
            live = self.held.without_abandoned(request)
            if _is_refused(request) and (
                live is None or len(request.pieces) == 1 or _concerns_every_publication(request)
            ):
                assert request.failure is not None
                self._numbers.abandoned(request)
                self.held.fail(live.pieces if live else (), request.failure)
            elif live is not None:  # without the abandoned pieces, the silo may accept it as it is
                cut_maybe_stored |= request.maybe_stored and _is_refused(request)
                again = not _is_refused(request) or len(live.pieces) < len(request.pieces)
                rebuilt += [live] if again else _halves(live)
        self._failed.clear()
        self._resend.extendleft(reversed(rebuilt))

    def _give_up(self, failure: HeadraceError) -> None:
        for request in self._resend:
            self._numbers.abandoned(request)
            self.held.fail(request.pieces, failure)
        self._resend.clear()

    # ---- abandoned requests ------------------------------------------------------------------------------------------

    def _drop_abandoned(self) -> None:
        """At the start of a round: drop requests up to the first one that a caller still waits for."""
        while self._resend and all(piece.publication.over for piece in self._resend[0].pieces):
            request = self._resend.popleft()
            self._numbers.abandoned(request)
            for piece in request.pieces:
                self.held.forget(piece)


def _batches(request: WindowedRequest) -> int:
    return sum([piece.batches for piece in request.pieces])


def _halves(request: WindowedRequest) -> list[WindowedRequest]:
    middle = len(request.pieces) // 2
    return [WindowedRequest(request.pieces[:middle]), WindowedRequest(request.pieces[middle:])]


def _is_conflicting(request: WindowedRequest) -> bool:
    return isinstance(request.failure, SequenceConflict)


def _is_refused(request: WindowedRequest) -> bool:
    """Whether the silo will never store it as it is. This includes a full queue: the silo was asked not to wait."""
    failure = request.failure
    assert failure is not None
    return isinstance(failure, QueueFull) or not (failure.retryable or isinstance(failure, SequenceConflict))


def _is_not_stored(request: WindowedRequest) -> bool:
    """Whether the answer shows that the silo did not store it now."""
    return _is_refused(request) or _is_conflicting(request)


def _concerns_every_publication(request: WindowedRequest) -> bool:
    """Whether the failure concerns every publication, so that cutting the request is useless."""
    return isinstance(request.failure, Unauthenticated | NotFound | NotSupported)
