"""What an idempotent producer has under way, and what it sends next. Pure.

Publications are cut into pieces, which are packed into requests. Each request has a number, and names the number before
it, so the silo stores nothing twice and refuses what would leave a hole. Several are under way at a time, and they are
answered in order.

When one fails, those after it fail too, for they follow on it. Nothing new is sent until all that was asked is
answered; then the round begins anew (go-back-N):

- after a failure that may pass, and after a lost connection, the same requests are sent again under their numbers;
- a refused request is cut in two, until the publication that the silo refuses is alone and fails by itself. It was not
  stored, so neither was what followed on it, and all of those get new numbers.

A request that nobody waits for any more is not sent again. It may be stored all the same, so the next one has to find
out on which number it follows: it tries the last that is known to be stored, then those that may be. A silo that does
not know the producer (it was idle for weeks, or the queues do not survive the process) is begun with anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ..errors import HeadraceError, NotFound, NotSupported, QueueFull, SequenceConflict, Unauthenticated
from ..publishing import Receipt


class WindowLimits(NamedTuple):
    """What may be under way."""

    request_bytes: int = 1 << 20
    """A request has at most so much, or a single batch."""
    request_batches: int = 1024
    requests: int = 32
    """Sent, and not answered."""
    bytes: int = 8 << 20


class Publication:
    """What one caller published. `over` once it is settled, or nobody waits for it."""

    __slots__ = ("error", "over", "pieces", "receipts")

    def __init__(self) -> None:
        self.pieces = 0
        """How many are not stored yet."""
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


class Piece:
    """Consecutive batches of a publication that travel together. `frames` are their bytes as they are sent."""

    __slots__ = ("batches", "frames", "publication", "size")

    def __init__(self, publication: Publication, frames: Sequence[bytes], batches: int, size: int) -> None:
        self.publication = publication
        self.frames = frames
        self.batches = batches
        self.size = size


class Request:
    """Pieces that are stored together or not at all. `number` is 0 until it is sent."""

    __slots__ = ("doubtful", "failure", "number", "pieces", "previous", "size")

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.size = sum([piece.size for piece in pieces])
        self.number = 0
        self.previous = 0
        self.doubtful = False
        """It was sent, and nobody knows whether it is stored."""
        self.failure: HeadraceError | None = None
        """Its answer in this round."""


class Window:
    """The requests of one producer. `new_producer` makes its id, and another one where the silo is at odds with it."""

    def __init__(self, new_producer: Callable[[], str], limits: WindowLimits | None = None) -> None:
        self.producer = new_producer()
        self.limits = limits or WindowLimits()
        self.setbacks = 0
        """Rounds in a row that failed in a way that may pass: wait before the next."""
        self.trouble: HeadraceError | None = None
        """The last such failure."""
        self.size = 0
        """Bytes of everything that is under way or waits."""
        self.pieces = 0
        self._new_producer = new_producer
        self._waiting: deque[Piece] = deque()
        # The requests, in their order: failed in this round, asked and not answered, to be sent (again).
        self._failed: list[Request] = []
        self._asked: deque[Request] = deque()
        self._again: deque[Request] = deque()
        self._asked_bytes = 0
        self._last = 0
        self._stored = 0
        self._doubtful: list[int] = []
        self._guesses = 0

    # ---- in and out --------------------------------------------------------------------------------------------------

    def add(self, piece: Piece) -> None:
        """Line up a piece, behind all that came before."""
        piece.publication.pieces += 1
        self._waiting.append(piece)
        self.size += piece.size
        self.pieces += 1

    def take(self) -> Request | None:
        """The next request to be sent, with its numbers; None where there is none for now."""
        limits = self.limits
        if len(self._asked) >= limits.requests or self._asked_bytes >= limits.bytes:
            return None
        request = self._next()
        if request is None:
            return None
        request.previous = self._before()
        if not request.number:
            self._last += 1
            request.number = self._last
        self._asked.append(request)
        self._asked_bytes += request.size
        return request

    def stored(self, receipts: Sequence[Receipt]) -> None:
        """The first unanswered request is stored; one receipt for each of its batches."""
        request = self._answered()
        # What it follows on is stored as well, though another answer said that it failed.
        for earlier in self._failed:
            self._settle(earlier, [Receipt(None, duplicate=True)] * _batches(earlier))
        self._failed.clear()
        self._settle(request, receipts)
        self._stored = request.number
        self._doubtful.clear()
        self._guesses = self.setbacks = 0
        self.trouble = None

    def failed(self, failure: HeadraceError) -> None:
        """The first unanswered request failed."""
        request = self._answered()
        request.failure = failure
        self._failed.append(request)
        if not self._asked and not self._must_probe():
            self._begin_round()

    def disconnected(self) -> None:
        """What was asked will not be answered."""
        for request in self._asked:
            request.doubtful = True
        self._again.extendleft(reversed(self._asked))
        self._asked.clear()
        self._asked_bytes = self._guesses = 0
        self._put_back()

    def fail_all(self, failure: HeadraceError) -> None:
        """Give everything up, after `disconnected`."""
        self._give_up(failure)
        for piece in self._waiting:
            self._leave(piece)
            piece.publication.fail(failure)
        self._waiting.clear()

    @property
    def idle(self) -> bool:
        """Nothing is under way, and nothing waits."""
        return not (self._waiting or self._again or self._asked or self._failed)

    @property
    def asked(self) -> int:
        """Requests that are sent and not answered."""
        return len(self._asked)

    @property
    def batches_expected(self) -> int:
        """How many receipts the next answer has."""
        return _batches(self._asked[0]) if self._asked else 0

    def sent(self) -> Iterator[Publication]:
        """Of what was sent at least once, or is going to be at once, from the oldest on."""
        requests = chain(self._failed, self._asked, self._again)
        return (piece.publication for request in requests for piece in request.pieces)

    def waiting(self) -> Iterator[Publication]:
        """Of what was not sent yet, from the oldest on. The first may be among those that were, too."""
        return (piece.publication for piece in self._waiting)

    # ---- what comes next ---------------------------------------------------------------------------------------------

    def _next(self) -> Request | None:
        if self._failed:
            return self._again.popleft() if self._must_probe() else None
        if not self._asked:
            self._drop_abandoned()
        while self._again:
            request = self._again.popleft()
            if request.number or (request := self._without_abandoned(request)):
                return request
        return self._pack()

    def _pack(self) -> Request | None:
        """As much of what waits as fits into one request."""
        limits, waiting = self.limits, self._waiting
        pieces: list[Piece] = []
        size = batches = 0
        while waiting:
            piece = waiting[0]
            if piece.publication.over:
                self._leave(waiting.popleft())
                continue
            size += piece.size
            batches += piece.batches
            if pieces and (size > limits.request_bytes or batches > limits.request_batches):
                break
            pieces.append(waiting.popleft())
        return Request(pieces) if pieces else None

    def _before(self) -> int:
        """The number that the next request to be sent follows on."""
        if self._asked:
            return self._asked[-1].number
        if self._failed:
            return self._failed[-1].number
        return self._candidates()[self._guesses]

    def _candidates(self) -> list[int]:
        """What the last number that the silo stored may be, the likely ones first."""
        return list(dict.fromkeys([self._stored, *reversed(self._doubtful), 0]))

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def _answered(self) -> Request:
        request = self._asked.popleft()
        self._asked_bytes -= request.size
        return request

    def _must_probe(self) -> bool:
        """A request is refused, and those after it that were sent in an earlier round may be stored: only once the silo
        has said of them that they follow on nothing, they can get new numbers."""
        return bool(self._failed and self._again) and _refused(self._failed[0]) and self._again[0].number > 0

    def _begin_round(self) -> None:
        first, *others = self._failed
        if _conflicting(first):
            self._guess_again()
        elif _refused(first) and all(map(_certain, others)):
            self._cut()
        else:
            self._repeat()

    def _repeat(self) -> None:
        """A failure that may pass: the same again, later."""
        self.setbacks += 1
        self.trouble = next(request.failure for request in self._failed if not _certain(request))
        self._put_back()

    def _put_back(self) -> None:
        for request in self._failed:
            request.doubtful |= not _certain(request)
        self._again.extendleft(reversed(self._failed))
        self._failed.clear()

    def _guess_again(self) -> None:
        """The silo stored another number last than was thought."""
        self._guesses += 1
        self._put_back()
        if self._guesses < len(self._candidates()):
            return
        self._give_up(
            SequenceConflict(
                "the silo has lost track of what this client published: these events may or may not be stored; look, "
                "and publish them again where they are missing"
            )
        )
        self.producer = self._new_producer()
        self._stored = 0
        self._doubtful.clear()
        self._guesses = 0

    def _cut(self) -> None:
        """What was refused is cut in two or fails; what followed on it goes on under new numbers."""
        rebuilt: list[Request] = []
        cut_in_doubt = False
        for request in self._failed:
            # Should one that is cut be stored after all, nothing may follow on it or on those behind it: it would be
            # stored twice. Then the silo is at odds, and those concerned are told.
            request.doubtful &= not cut_in_doubt
            live = self._without_abandoned(request)
            if _refused(request) and (live is None or len(request.pieces) == 1 or _concerns_all(request)):
                self._fail(live or request, request)
            elif live is not None:  # without those who went, it may be taken as it is
                cut_in_doubt |= request.doubtful and _refused(request)
                again = not _refused(request) or len(live.pieces) < len(request.pieces)
                rebuilt += [live] if again else _halves(live)
        self._failed.clear()
        self._again.extendleft(reversed(rebuilt))

    def _fail(self, live: Request, refused: Request) -> None:
        assert refused.failure is not None
        self._note_doubt(refused)
        for piece in live.pieces:
            if not piece.publication.over:
                self._leave(piece)
                piece.publication.fail(refused.failure)

    def _give_up(self, failure: HeadraceError) -> None:
        for request in self._again:
            self._note_doubt(request)
            for piece in request.pieces:
                self._leave(piece)
                piece.publication.fail(failure)
        self._again.clear()

    # ---- what is over ------------------------------------------------------------------------------------------------

    def _drop_abandoned(self) -> None:
        """At the start of a round: what nobody waits for, up to the first that somebody waits for."""
        while self._again and all(piece.publication.over for piece in self._again[0].pieces):
            request = self._again.popleft()
            self._note_doubt(request)
            for piece in request.pieces:
                self._leave(piece)

    def _note_doubt(self, request: Request) -> None:
        """The request is given up, though it may be stored."""
        if request.doubtful:
            self._doubtful.append(request.number)
            self._guesses = 0

    def _without_abandoned(self, request: Request) -> Request | None:
        """What of a request that is not stored is still waited for, as a new request; None for nothing."""
        live: list[Piece] = []
        for piece in request.pieces:
            if piece.publication.over:
                self._leave(piece)
            else:
                live.append(piece)
        return Request(live) if live else None

    def _settle(self, request: Request, receipts: Sequence[Receipt]) -> None:
        at = 0
        for piece in request.pieces:
            end = at + piece.batches
            piece.publication.store(receipts[at:end])
            at = end
        self.size -= request.size
        self.pieces -= len(request.pieces)

    def _leave(self, piece: Piece) -> None:
        self.size -= piece.size
        self.pieces -= 1


def _batches(request: Request) -> int:
    return sum([piece.batches for piece in request.pieces])


def _halves(request: Request) -> list[Request]:
    middle = len(request.pieces) // 2
    return [Request(request.pieces[:middle]), Request(request.pieces[middle:])]


def _conflicting(request: Request) -> bool:
    return isinstance(request.failure, SequenceConflict)


def _refused(request: Request) -> bool:
    """It will not be stored as it is. A full queue is no failure that passes: the silo was told not to wait for it."""
    failure = request.failure
    assert failure is not None
    return isinstance(failure, QueueFull) or not (failure.retryable or isinstance(failure, SequenceConflict))


def _certain(request: Request) -> bool:
    """The silo says that it did not store it now."""
    return _refused(request) or _conflicting(request)


def _concerns_all(request: Request) -> bool:
    """Whoever published: to cut it would not help."""
    return isinstance(request.failure, Unauthenticated | NotFound | NotSupported)
