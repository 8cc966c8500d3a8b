"""Checkpoints: the progress of all served subscriptions, stored in one transaction.

Every write carries the subscription's epoch and, in a cluster, the epochs of the leases. So an owner that was
superseded is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import count
from typing import NamedTuple

from ..streams.background import run_periodically
from ..streams.errors import HeadraceError
from ..streams.histograms import Histogram
from ..streams.progress import RefusedProgress
from ..streams.subscriptions import Checkpoint
from .delivery.checkpoint_pacer import UnsavedProgress
from .delivery.confirmations import RedrivePositions, ReportMark
from .host_state import HostState
from .progress_store import ProgressStore
from .served import ServedSubscription

log = logging.getLogger("headrace.agents")

CHECKPOINT_S = 0.1
"""How often progress is stored while it changes, in seconds. Events done since the last time are delivered again after
a crash."""
CHECK_OWNER_S = 1.0
"""While no progress changes: how often the store is asked whether subscriptions have another owner, in seconds."""


class _LastProgress(NamedTuple):
    """The progress in a queue that is not read any more."""

    checkpoint: Checkpoint
    marks: Sequence[ReportMark]
    """Reports that are confirmed when it is stored."""


class Checkpointer:
    """Stores progress: periodically, and when queues or subscriptions stop."""

    def __init__(self, state: HostState, store: ProgressStore) -> None:
        self.lock = asyncio.Lock()
        """Held while progress is stored or moved."""
        self.on_queue_refused: Callable[[int], None] = lambda _: None
        """Called with a queue that another silo owns now."""
        self.on_subscription_refused: Callable[[str], None] = lambda _: None
        """Called with the name of a subscription that another process took over."""
        self._state = state
        self._store = store
        self._unsaved: dict[int, dict[tuple[str, int], _LastProgress]] = {}
        """Progress in queues that are not read any more, by subscription and epoch, until it is stored."""
        self._revisions = count(1)
        """Numbers of the calls that store progress."""
        self._check_owner_at = 0.0
        """Loop time from which on `save` asks the store even if no progress has changed."""
        self.durations = Histogram()
        """How long `save` took."""
        self._saved_at = asyncio.get_running_loop().time()
        """Loop time of the last `save` that had no error."""
        self._sleeping = False

    async def run(self) -> None:
        """Store progress periodically, while it changes. Does not end."""
        await run_periodically(self.save, CHECKPOINT_S, self._wait_for_change)

    async def _wait_for_change(self) -> None:
        """Return when there may be something to store, or when the store is to be asked for the owners. If no other
        process has the store, there is no other owner."""
        if not self._is_saved():
            return
        self._sleeping = True
        try:
            await self._state.wait_for_change(None if self._store.private else CHECK_OWNER_S)
        finally:
            self._sleeping = False
            self._saved_at = asyncio.get_running_loop().time()  # until now, everything was stored

    def _is_saved(self) -> bool:
        """Whether everything is stored, and all reports are confirmed. A running handler may finish an event at any
        time, so its progress counts as not stored. But a store that ends with this process needs it only once the batch
        ends."""
        if self._state.recorder.has_gaps:
            return False
        private = self._store.private
        for served in self._state.served.values():
            for delivery in served.deliveries.values():
                if not served.service.stored:
                    if delivery.marks():
                        return False
                elif not delivery.is_saved() or (delivery.is_handling and not private):
                    return False
        return True

    def age_s(self) -> float:
        """The time since the last `save` that had no error, in seconds; 0 while there is nothing to store."""
        return 0.0 if self._sleeping else asyncio.get_running_loop().time() - self._saved_at

    async def save(self) -> None:
        """Store the checkpoints that changed, in one transaction. Stop queues and subscriptions that it refuses."""
        state, loop = self._state, asyncio.get_running_loop()
        began = loop.time()
        async with self.lock:
            leases = state.leases_now()
            progress = [(served, _unsaved(served)) for served in state.served.values() if served.service.stored]
            marks = [(name, _marks(served)) for name, served in state.served.items()]
            # Gaps are stored after progress was read and before it is stored: a crash must not leave a checkpoint past
            # an unrecorded gap.
            await state.recorder.save_gaps()
            rows = [(served.definition.name, served.epoch, _changed(served, unsaved)) for served, unsaved in progress]
            refused = RefusedProgress()
            if any(changed for _, _, changed in rows) or (rows and loop.time() >= self._check_owner_at):
                refused = await self._store.save_checkpoints(
                    state.provider, rows, leases, revision=next(self._revisions)
                )
                self._check_owner_at = loop.time() + CHECK_OWNER_S
            stale = refused.subscriptions
            for served, unsaved in progress:
                if served.definition.name not in stale:
                    for queue in unsaved.keys() - refused.queues:
                        served.note_stored({queue: unsaved[queue].checkpoint})
                        unsaved[queue].note_saved()
            for name, reports in marks:
                if name not in stale:
                    await self._confirm(name, reports, refused.queues)
        self._saved_at = loop.time()
        self.durations.observe(self._saved_at - began)
        if any(changed for _, _, changed in rows):
            state.note_change()  # wake the acknowledger: queues that outlive the process hear only of stored progress
        for queue in self._no_longer_held(refused.queues, leases):
            log.warning(
                "queue %d of %r has another owner by now: it is not served here any more", queue, state.provider
            )
            self.on_queue_refused(queue)
        for name in stale:
            self.on_subscription_refused(name)

    def _no_longer_held(self, refused: Iterable[int], leases: Mapping[int, int] | None) -> list[int]:
        """Refused queues that are still served under the refused lease. This silo may have a newer one by now."""
        now = self._state.leases or {}
        return [queue for queue in refused if queue in now and now[queue] == (leases or {}).get(queue)]

    async def _confirm(self, name: str, marks: Mapping[int, Sequence[ReportMark]], refused: AbstractSet[int]) -> None:
        """Confirm the reports that are in the stored progress of a subscription. The progress of refused queues is not
        stored. Without an answer of the store about redrives, the reports are confirmed later."""
        for queue in marks.keys() - refused:
            redrives: RedrivePositions = {}
            if offsets := [offset for mark in marks[queue] for offset in mark.offsets]:
                try:
                    redrives = await self._store.requested_redrives(
                        self._state.provider, name, queue, min(offsets), max(offsets)
                    )
                except HeadraceError as error:
                    log.warning("acknowledgements for %r, queue %d are confirmed later: %s", name, queue, error)
                    continue
            for mark in marks[queue]:
                mark.confirm(redrives)

    # ---- subscriptions and queues that stop --------------------------------------------------------------------------

    async def save_withdrawn(
        self, served: ServedSubscription, final: Mapping[int, Checkpoint], leases: Mapping[int, int] | None
    ) -> None:
        """Store the last checkpoints of a subscription, which were read under these leases."""
        marks = {queue: delivery.marks() for queue, delivery in served.deliveries.items()}
        async with self.lock:
            await self._state.recorder.save_gaps()
            refused = await self._save_last(served, final, leases) if served.service.stored else RefusedProgress()
            if not refused.subscriptions:
                await self._confirm(served.definition.name, marks, refused.queues)

    async def _save_last(
        self, served: ServedSubscription, final: Mapping[int, Checkpoint], leases: Mapping[int, int] | None
    ) -> RefusedProgress:
        name = served.definition.name
        progress = [(name, served.epoch, final)]
        revision = next(self._revisions)
        refused = await self._store.save_checkpoints(self._state.provider, progress, leases, revision=revision)
        if refused.queues:
            log.warning("subscription %r: queues %s have another owner by now", name, sorted(refused.queues))
        if refused.subscriptions:
            log.warning("subscription %r was taken over: its last checkpoint is not saved", name)
        else:
            served.note_stored({queue: final[queue] for queue in final.keys() - refused.queues})
        return refused

    async def save_stopped(self, done: Mapping[int, Mapping[str, Checkpoint]]) -> None:
        """Store progress in queues that are not read any more, given by queue and subscription."""
        state = self._state
        finals = [(served, self._finals(served, done)) for served in state.served.values()]
        async with self.lock:
            await state.recorder.save_gaps()
            for served, final in finals:
                checkpoints, refused = {queue: last.checkpoint for queue, last in final.items()}, RefusedProgress()
                if not served.service.stored:
                    served.note_stored(checkpoints)
                elif final:
                    refused = await self._save_last(served, checkpoints, state.leases)
                if refused.subscriptions:
                    self.on_subscription_refused(served.definition.name)
                else:
                    marks = {queue: last.marks for queue, last in final.items()}
                    await self._confirm(served.definition.name, marks, refused.queues)
        for queue in done:
            self._unsaved.pop(queue, None)

    def _finals(
        self, served: ServedSubscription, done: Mapping[int, Mapping[str, Checkpoint]]
    ) -> dict[int, _LastProgress]:
        """A subscription's progress in these queues: from `done`, or from an earlier call that could not store it. It
        is kept until it is stored."""
        key, finals = (served.definition.name, served.epoch), dict[int, _LastProgress]()
        for queue, checkpoints in done.items():
            unsaved = self._unsaved.setdefault(queue, {})
            if served.definition.name in checkpoints:
                delivery = served.end(queue)
                marks = () if delivery is None else delivery.marks()
                unsaved[key] = _LastProgress(checkpoints[served.definition.name], marks)
            if key in unsaved:
                finals[queue] = unsaved[key]
        return finals

    async def save_unsaved(self, queues: Iterable[int]) -> None:
        """Store what earlier calls of `save_stopped` could not store. Call it before these queues are read again."""
        if unsaved := [queue for queue in queues if queue in self._unsaved]:
            await self.save_stopped({queue: {} for queue in unsaved})

    def drop_unsaved(self, queue: int) -> None:
        """Forget progress that is not stored: the lease under which it was made is over."""
        self._unsaved.pop(queue, None)


def _unsaved(served: ServedSubscription) -> dict[int, UnsavedProgress]:
    """Progress by queue that may differ from the stored checkpoints."""
    found = {queue: delivery.unsaved() for queue, delivery in served.deliveries.items()}
    return {queue: unsaved for queue, unsaved in found.items() if unsaved is not None}


def _marks(served: ServedSubscription) -> dict[int, Sequence[ReportMark]]:
    """The reports that are in the progress that `_unsaved` has just read. None if its checkpoint is held back."""
    deliveries = served.deliveries.items()
    return {queue: delivery.marks() for queue, delivery in deliveries if not delivery.pacer.held_back}


def _changed(served: ServedSubscription, unsaved: Mapping[int, UnsavedProgress]) -> dict[int, Checkpoint]:
    now = {queue: each.checkpoint for queue, each in unsaved.items()}
    return {queue: checkpoint for queue, checkpoint in now.items() if served.saved.get(queue) != checkpoint}
