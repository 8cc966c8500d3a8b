"""Moves the events of an outbox into the queues of a provider, in the background."""

from __future__ import annotations

import asyncio
import logging

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from ..effects.administration import engine_of
from ..effects.database import database_of
from ..effects.mover import OutboxBacklog, OutboxMover, OutboxTarget
from ..streams.background import BackgroundTasks, run_periodically
from ..streams.errors import HeadraceError
from .views import OutboxView

log = logging.getLogger("headrace.silo")

COUNT_S = 1.0
"""Interval of counting the events that wait, in seconds."""


class OutboxService:
    """The outbox of a database, for one provider."""

    def __init__(self, engine: Engine, target: OutboxTarget) -> None:
        self._engine = engine
        self.mover = OutboxMover(database_of(engine), target)
        self._backlog = OutboxBacklog(0, 0, 0.0, 0)
        self._background = BackgroundTasks()
        self._name = target.name

    @classmethod
    async def opened(cls, url: str, target: OutboxTarget) -> OutboxService:
        """Return the service of the database at a URL of SQLAlchemy. Raises InvalidArgument, NotSupported."""
        return cls(await asyncio.to_thread(engine_of, url), target)

    def start(self) -> None:
        """Move events until `aclose`."""
        url = self._engine.url
        log.info("the outbox in %s is moved into provider %r", url.set(password=None, query={}), self._name)
        self._background.start(self.mover.run(), f"headrace outbox {self._name}")
        self._background.start(run_periodically(self._count, COUNT_S), f"headrace outbox count {self._name}")

    async def _count(self) -> None:
        try:
            self._backlog = await self.mover.backlog()
        except (HeadraceError, SQLAlchemyError) as error:  # the mover reports what is wrong with the database
            log.debug("the outbox of %r cannot be counted: %s", self._name, error)

    def statistics(self) -> OutboxView:
        backlog = self._backlog
        return OutboxView(self.mover.moved_events, backlog.events, backlog.age_s, backlog.refused, self.mover.problem)

    async def aclose(self) -> None:
        """Stop. Events that are not moved yet stay in the outbox."""
        await self._background.aclose()
        self._engine.dispose()
