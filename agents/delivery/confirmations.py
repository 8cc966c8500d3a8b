"""Confirmations: which acknowledgements of a queue are in the control store. Pure.

A consumer numbers its reports. When the progress of a queue is read for a checkpoint, `mark` notes the numbers of the
reports that are in the progress. `ReportMark.confirm` is called after the store has the checkpoint.

A consumer may ask whether events are done that it acknowledged in an earlier session. Such a question is open until the
events are done in the progress of the queue, whichever consumer acknowledged them.

Dead letters are not in the progress: the store deletes one when its redrive is finished. So a report with an
acknowledgement of a dead letter is confirmed after that, and no question about a dead letter is answered while its
redrive is requested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ...streams.errors import InvalidArgument
from ...streams.identity import SequenceToken, StreamId
from .progress import DeliveryProgress

MAX_QUESTIONS = 100_000
"""The most open questions of one member in one queue."""


RedrivePositions = Mapping[int, Sequence[int]]
"""Positions of dead letters whose redrive is requested: indexes by offset."""


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

    def includes_any(self, positions: RedrivePositions) -> bool:
        """Whether one of the positions is among its events."""
        return any(self.first <= index < self.end for index in positions.get(self.offset, ()))


class ReportMark(NamedTuple):
    """The reports of one member that are in the progress that was read for a checkpoint."""

    reports: MemberReports
    member: Reporter
    queue: int
    confirmed: Confirmed

    @property
    def offsets(self) -> Sequence[int]:
        """The offsets of the questions that would be confirmed as answered."""
        return self.reports.answered_offsets(self.confirmed.unconfirmed)

    def confirm(self, redrives: RedrivePositions) -> None:
        """The checkpoint is stored: tell the member. `redrives` are the dead letters at `offsets` that are to be
        delivered once more, read after the mark was made."""
        self.reports.confirm(self, redrives)


class MemberReports:
    """The reports of one connection of a member about one queue."""

    def __init__(self, connection: int) -> None:
        self.connection = connection
        self._applied = 0
        """Number of the last report that is applied."""
        self._questions: deque[DoneQuestion] = deque()
        """Open questions, in the order of reports."""
        self._answered: deque[DoneQuestion] = deque()
        """The questions before these. Their events are done in the progress, and that is not confirmed yet."""
        self._redriven: dict[SequenceToken, int] = {}
        """Acknowledged dead letters whose result is not stored, with the last report before the acknowledgement."""
        self._confirmed = (0, 0)
        """Numbers of the last confirmation."""

    def note_applied(self, number: int) -> None:
        self._applied = max(self._applied, number)

    def ask(self, questions: Sequence[DoneQuestion]) -> None:
        """Keep questions until the answer is yes. Raise InvalidArgument if there are too many; keep none then."""
        if len(self._answered) + len(self._questions) + len(questions) > MAX_QUESTIONS:
            raise InvalidArgument(
                f"more than {MAX_QUESTIONS:,} events of one queue are unconfirmed: name consecutive events together"
            )
        self._questions.extend(questions)

    def begin_redriven(self, position: SequenceToken) -> None:
        """The next report acknowledges a dead letter: do not confirm it until `end_redriven`."""
        self._redriven[position] = self._applied

    def end_redriven(self, position: SequenceToken) -> None:
        """The store has the result of a redrive."""
        self._redriven.pop(position, None)

    def numbers(self, progress: DeliveryProgress) -> tuple[int, int] | None:
        """Return two numbers that are true of the present progress: of the last report, and of the last report whose
        questions are answered. None if both are confirmed already."""
        questions = self._questions
        while questions and progress.is_done(*questions[0][1:]):
            self._answered.append(questions.popleft())
        answered = min(questions[0].number - 1, self._applied) if questions else self._applied
        numbers = min([self._applied, *self._redriven.values()]), answered
        return None if numbers == self._confirmed else numbers

    @property
    def is_waiting(self) -> bool:
        """Whether a question is open, or a report is not confirmed because of a dead letter."""
        return bool(self._questions or self._answered or self._redriven)

    def answered_offsets(self, number: int) -> Sequence[int]:
        return [question.offset for question in self._answered if question.number <= number]

    def confirm(self, mark: ReportMark, redrives: RedrivePositions) -> None:
        confirmed, answered = mark.confirmed, self._answered
        while answered and answered[0].number <= confirmed.unconfirmed:
            if answered[0].includes_any(redrives):
                confirmed = confirmed._replace(unconfirmed=answered[0].number - 1)
                break
            answered.popleft()
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

    def end_redriven(self, position: SequenceToken) -> None:
        """The store has the result of a redrive."""
        for reports in self._pending.values():
            reports.end_redriven(position)

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
            elif not reports.is_waiting:
                del self._pending[member]
        return marks
