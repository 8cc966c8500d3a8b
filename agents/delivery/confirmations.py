"""Confirmations: which acknowledgements of a queue are in the control store. Pure.

A consumer numbers its reports. When the progress of a queue is read for a checkpoint, `mark` notes the numbers of the
reports that are in the progress. `ReportMark.confirm` is called after the store has the checkpoint.

A consumer may ask whether events are done that it acknowledged in an earlier session. Such a question is open until the
events are done in the progress of the queue, whichever consumer acknowledged them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from ...streams.errors import InvalidArgument
from ...streams.identity import StreamId
from .progress import DeliveryProgress

MAX_QUESTIONS = 100_000
"""The most open questions of one member in one queue."""


class Confirmed(NamedTuple):
    """What is saved of one queue."""

    epoch: int
    """The queue's epoch, as in its status."""
    number: int
    """All events acknowledged in reports up to this number are saved."""
    unconfirmed: int
    """All events named as unconfirmed in reports up to this number are done and saved."""


class Reporter(Protocol):
    """A member, as its confirmations see it."""

    @property
    def connections(self) -> int:
        """How often it connected. Each connection numbers its reports from the start."""
        ...

    def confirm(self, queue: int, confirmed: Confirmed) -> None:
        """Tell the consumer."""
        ...


class DoneQuestion(NamedTuple):
    """Are these events done?"""

    number: int
    """Number of the report that asks."""
    stream: StreamId
    offset: int
    first: int
    end: int
    """Index after the last event."""


class ReportMark(NamedTuple):
    """The reports of one member that are in the progress that was read for a checkpoint."""

    reports: MemberReports
    member: Reporter
    queue: int
    confirmed: Confirmed

    def confirm(self) -> None:
        """The checkpoint is stored: tell the member."""
        self.reports.confirm(self)


class MemberReports:
    """The reports of one connection of a member about one queue."""

    def __init__(self, connection: int) -> None:
        self.connection = connection
        self._applied = 0
        """Number of the last report that is applied."""
        self._questions: deque[DoneQuestion] = deque()
        """Open questions, in the order of reports."""
        self._confirmed = (0, 0)
        """Numbers of the last confirmation."""

    def note_applied(self, number: int) -> None:
        self._applied = max(self._applied, number)

    def ask(self, questions: Iterable[DoneQuestion]) -> None:
        """Keep questions until the answer is yes. Raise InvalidArgument if there are too many; keep none then."""
        questions = list(questions)
        if len(self._questions) + len(questions) > MAX_QUESTIONS:
            raise InvalidArgument(
                f"more than {MAX_QUESTIONS:,} events of one queue are unconfirmed: name consecutive events together"
            )
        self._questions.extend(questions)

    def numbers(self, progress: DeliveryProgress) -> tuple[int, int] | None:
        """Return two numbers that are true of the present progress: of the last report, and of the last report whose
        questions are answered. None if both are confirmed already."""
        questions = self._questions
        while questions and progress.is_done(*questions[0][1:]):
            questions.popleft()
        answered = min(questions[0].number - 1, self._applied) if questions else self._applied
        numbers = self._applied, answered
        return None if numbers == self._confirmed else numbers

    @property
    def asks(self) -> bool:
        """Whether a question is open."""
        return bool(self._questions)

    def confirm(self, mark: ReportMark) -> None:
        confirmed = mark.confirmed
        if mark.member.connections == self.connection and self._confirmed < confirmed[1:]:
            self._confirmed = confirmed[1:]
            mark.member.confirm(mark.queue, confirmed)


class QueueReports:
    """The reports of all members about one queue, under one epoch."""

    def __init__(self, queue: int, epoch: int) -> None:
        self._queue = queue
        self._epoch = epoch
        self._members: dict[Reporter, MemberReports] = {}
        self._pending: dict[Reporter, MemberReports] = {}
        """Those that may have something to confirm."""

    def of(self, member: Reporter) -> MemberReports:
        """Return the reports of the member's present connection, to add to them."""
        reports = self._members.get(member)
        if reports is None or reports.connection != member.connections:
            reports = self._members[member] = MemberReports(member.connections)
        self._pending[member] = reports
        return reports

    def forget(self, member: Reporter) -> None:
        """The member's connection is over."""
        self._members.pop(member, None)
        self._pending.pop(member, None)

    def mark(self, progress: DeliveryProgress) -> list[ReportMark]:
        """Return the reports that are in the present progress, and are not confirmed yet."""
        marks: list[ReportMark] = []
        for member, reports in list(self._pending.items()):
            if (numbers := reports.numbers(progress)) is not None:
                marks.append(ReportMark(reports, member, self._queue, Confirmed(self._epoch, *numbers)))
            elif not reports.asks:
                del self._pending[member]
        return marks
