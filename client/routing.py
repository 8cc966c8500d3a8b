"""The sessions of one consumer with the silos of a cluster.

A `Router` opens the first session at the address that the caller knows. A silo of a cluster then pushes the placement,
and the router opens one session to each silo that owns queues. It divides the consumer's credit among them. If an owner
cannot be reached, the router goes on with one session without `direct`: that silo is then the consumer's gateway. A
silo that is alone pushes no placement, and has one session.

A gateway has a router of its own, with the same code: it begins with its own silo, and always stays direct.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ..proto.v1 import consumer_pb2 as pb
from ..streams.background import end
from ..streams.errors import Busy, Fenced, HeadraceError, Unavailable
from .credit import CreditAmount
from .links import DRAINING, ENDED, SERVED, LinkUser, QueueStatus, SiloLink, SiloLinks
from .owners import GatewayUse, OwnerSilo, OwnerSilos
from .subscribe_call import METHOD
from .transport import StreamCall, Transport, reconnect_backoff

__all__ = [
    "ATTACH_S",
    "DRAINING",
    "ENDED",
    "SERVED",
    "LinkUser",
    "QueueStatus",
    "Router",
    "SessionCalls",
    "SiloLink",
    "TransportCalls",
]

log = logging.getLogger("headrace.client")
WARN_AFTER_S, WARN_EVERY_S = 5.0, 60.0
"""Seconds without a session until the first warning, and between later ones."""

ATTACH_S = 1.0
"""Time that all owners have to accept a new consumer before its user is told that it is open, in seconds."""
IDLE_S = 5.0
"""A session with a silo without queues is closed after so many seconds. The silo may have got one, and the placement is
late."""
OPENING_S = 1.0
"""How long `close` waits for a session that is opening, in seconds."""
IMPATIENT_S = 0.25
"""If a session waits for credit longer than this, all other sessions give their unused credit back, in seconds."""


class SessionCalls(Protocol):
    """Begins the calls of a consumer's sessions."""

    @property
    def direct(self) -> bool:
        """Whether owners of queues can be called."""
        ...

    def first(self) -> StreamCall:
        """Begin the first session, or one with a gateway."""
        ...

    def to_owner(self, silo: str, address: str) -> StreamCall:
        """Begin a session with an owner of queues. May raise a HeadraceError."""
        ...


class TransportCalls:
    """The calls of a client."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def direct(self) -> bool:
        return self._transport.is_remote

    def first(self) -> StreamCall:
        return self._transport.stream(METHOD)

    def to_owner(self, silo: str, address: str) -> StreamCall:
        return self._transport.at(address).stream(METHOD)


class Router:
    """All sessions of one consumer. Between them and the user it accounts for credit, and for the owner of each queue.

    With `stays_direct` it never uses a gateway. `timeout_s` is how long it tries to reach a silo while no session is
    open; None: without a limit. `on_open` is called when a session is open and there was none, and `on_reconnecting`
    with the reason when no session is open any more. While none is open, `on_waiting` is called for each warning, with
    the last reason and the seconds without a session.
    """

    def __init__(
        self,
        user: LinkUser,
        calls: SessionCalls,
        *,
        stays_direct: bool = False,
        timeout_s: float | None = None,
        on_open: Callable[[], None] = lambda: None,
        on_reconnecting: Callable[[HeadraceError], None] = lambda _: None,
        on_waiting: Callable[[HeadraceError, float], None] = lambda _, __: None,
    ) -> None:
        self._user = user
        self._calls = calls
        self._stays_direct = stays_direct
        self._timeout_s = timeout_s
        self._on_open = on_open
        self._on_reconnecting = on_reconnecting
        self._on_waiting = on_waiting
        self._loop = asyncio.get_running_loop()
        self._links = SiloLinks(user, self._opened, self._place)
        self._owners = OwnerSilos()
        self._tasks: dict[SiloLink, asyncio.Task[HeadraceError | None]] = {}
        self._space = asyncio.Event()
        self._space.set()
        self._turn = asyncio.Event()
        """There is something for `run` to do."""
        self._closing = False
        self._is_over = False
        self._error: HeadraceError | None = None
        self._was_open = False
        """Whether any session was ever open."""
        self._is_open = False
        self._backoff = reconnect_backoff()
        self._attempts = 0
        """Attempts since no session is open."""
        self._enter_at = self._unopened_since = self._loop.time()
        self._warn_at = self._unopened_since + WARN_AFTER_S
        self._gateway = GatewayUse()

    # ---- the user ----------------------------------------------------------------------------------------------------

    @property
    def uses_gateway(self) -> bool:
        """Whether one silo serves the consumer for all."""
        return self._gateway.is_used

    @property
    def links(self) -> Sequence[SiloLink]:
        """The open sessions."""
        return self._links.open

    @property
    def credit(self) -> CreditAmount:
        """Credit that was granted and not used yet."""
        return self._links.ledger.total

    def grant(self, events: int, size: int) -> None:
        """Grant credit, also before `run`."""
        self._links.ledger.grant(events, size)
        self._links.lend()

    def link_of(self, queue: int) -> SiloLink | None:
        """The session that serves a queue."""
        return self._links.serving(queue)

    def progress(self) -> pb.Progress:
        """The progress of all sessions together: `caught_up` if they serve all queues of the subscription and each has
        caught up. `needed_bytes` is above 0 only if an event needs more than all credit."""
        return self._links.progress()

    def pause(self) -> None:
        """Receive nothing more, apart from a response of each session that has come already, until `resume`."""
        self._space.clear()

    def resume(self) -> None:
        """Receive again. Idempotent."""
        self._space.set()

    async def attached(self, timeout_s: float) -> None:
        """Return when all owners of queues have accepted the consumer, but at the latest after `timeout_s` seconds, or
        when the sessions have ended for good."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (self._is_complete or self._is_over):
                    self._links.state_changed.clear()
                    await self._links.state_changed.wait()
        except TimeoutError:
            log.info("a silo is slow to accept a consumer")

    @property
    def _is_complete(self) -> bool:
        silos = {link.silo for link in self._links.open}
        return bool(silos) and (silos == {""} or (self._owners.is_known and silos >= self._owners.keys()))

    async def take_back(self, timeout_s: float) -> CreditAmount:
        """Take back all credit that is not used, and return it. A silo has `timeout_s` seconds to answer. Nothing may
        be granted meanwhile."""
        return await self._links.take_back(timeout_s)

    def close(self) -> None:
        """Send everything, and end all sessions in order; then `run` returns. If one is lost meanwhile, `run` raises
        the reason: the silo may not have saved everything. Idempotent."""
        self._closing = True
        for link, task in self._tasks.items():
            if link.is_open:
                link.close()
            elif link.has_begun:  # the silo may send events: if it answers soon, `_opened` closes the session in order
                self._loop.call_later(OPENING_S, _give_up, link, task)
            else:
                task.cancel()
        self._turn.set()

    async def run(self) -> None:
        """Keep the sessions until `close`. Raise the HeadraceError that ended them for good."""
        try:
            while self._error is None and not (self._closing and not self._tasks):
                self._turn.clear()
                pause_s = self._step(self._loop.time())
                try:
                    async with asyncio.timeout(pause_s):
                        await self._turn.wait()
                except TimeoutError:
                    pass
        finally:
            self._is_over = True
            await end(*self._tasks.values())
            self._links.state_changed.set()
        if self._error is not None:
            raise self._error

    # ---- which sessions there are ------------------------------------------------------------------------------------

    def _step(self, now: float) -> float:
        """Open and close sessions. Return after how many seconds to look again."""
        self._links.be_impatient(now, IMPATIENT_S)
        if self._closing:
            return IMPATIENT_S
        if not self._tasks:
            return self._enter(now)
        if self.uses_gateway:
            if now >= self._gateway.ends_at:
                self._change_sessions()
            return min(IMPATIENT_S, max(self._gateway.ends_at - now, 0.0))
        if self._links.open:
            self._follow(now)
        return IMPATIENT_S

    def _enter(self, now: float) -> float:
        """No session: call the first silo, and then by turns the owners that were known."""
        if now < self._enter_at:
            return self._enter_at - now
        direct = self._calls.direct and not self.uses_gateway
        entrances = [None, *self._owners.values()] if direct else [None]
        self._start(entrances[self._attempts % len(entrances)], direct=direct)
        self._attempts += 1
        return IMPATIENT_S

    def _follow(self, now: float) -> None:
        """One session for each owner of the placement."""
        called = {link.silo or link.expected for link in self._links.present}
        for owner in self._owners.values():
            if owner.silo not in called and now >= owner.not_before:
                self._start(owner, direct=True)
        if not self._stays_direct and any(owner.is_unreachable(now) for owner in self._owners.values()):
            log.warning("not all silos that own queues can be reached from here: a silo serves as gateway")
            self._change_sessions()
            return
        for link in self._links.open:
            others = any(other.silo in self._owners and other is not link for other in self._links.open)
            if others and link.silo not in self._owners and not link.queues:
                link.idle_since = now if link.idle_since is None else link.idle_since
                if now - link.idle_since >= IDLE_S:
                    link.close()
            else:
                link.idle_since = None

    def _change_sessions(self) -> None:
        """Give up all sessions, and begin with a gateway, or without one if there was one.

        They are not closed: then the silos would give the events that the user holds to other consumers."""
        self._gateway.change(self._loop.time())
        self._owners.forget()
        self._links.queues = 0
        self._attempts = 0
        self._enter_at = self._loop.time()
        for task in self._tasks.values():
            task.cancel()
        self._turn.set()

    def _place(self) -> None:
        """A silo has sent the owners."""
        if self.uses_gateway:
            return
        self._owners.place(self._links.addresses(), {link.silo for link in self._links.open}, self._loop.time())
        self._turn.set()

    # ---- one session -------------------------------------------------------------------------------------------------

    def _start(self, owner: OwnerSilo | None, *, direct: bool) -> None:
        opening = self._user.open()
        opening.direct = direct
        if opening.started_us:
            opening.started_us += self._gateway.changes
        link = self._links.add("" if owner is None else owner.silo)
        name = f"headrace session with {link.expected or 'a silo'}"
        task = self._tasks[link] = self._loop.create_task(self._keep(link, owner, opening), name=name)
        # Not in `_keep`: a task that is cancelled before its first step runs nothing of it.
        task.add_done_callback(partial(self._remove, link))

    async def _keep(self, link: SiloLink, owner: OwnerSilo | None, opening: pb.Open) -> HeadraceError | None:
        """Converse. Return the error that ended the session, None if it ended in order."""
        try:
            call = self._calls.first() if owner is None else self._calls.to_owner(owner.silo, owner.address)
            await link.run(call, opening, self._space)
        except HeadraceError as failure:
            return failure
        except Exception as failure:
            log.exception("the session with silo %s failed", link.silo or link.expected)
            return HeadraceError(f"the session with silo {link.silo or link.expected} failed: {failure}")
        return None if link.is_closing else Unavailable(f"silo {link.silo or call.address} ended the call")

    def _remove(self, link: SiloLink, task: asyncio.Task[HeadraceError | None]) -> None:
        """A session has ended."""
        del self._tasks[link]
        self._links.remove(link)
        if not task.cancelled() and (error := task.result()) is not None:
            self._lose(link, error)
        self._turn.set()

    def _opened(self, link: SiloLink) -> None:
        if (owner := self._owners.get(link.silo)) is not None:
            owner.reached()
        self._backoff.reset()
        self._attempts = 0
        self._was_open = True
        if self._closing:
            link.close()
        elif not self._is_open:
            self._is_open = True
            self._on_open()
        self._turn.set()

    def _lose(self, link: SiloLink, error: HeadraceError) -> None:
        """A session failed. Errors are for good that no other attempt can mend, but not those of an owner that a client
        calls the first time: another silo may answer at its address."""
        now = self._loop.time()
        if (owner := self._owners.get(link.expected or link.silo)) is not None:
            owner.failed(now)
        if self._closing and not link.is_open:
            return  # it would end the other sessions, which may still save something
        if self._is_for_good(link, owner, error) or self._closing:
            self._error = self._error or error
            return
        if link.is_open or not link.expected:
            log.debug("the session with silo %s ended: %s", link.silo, error)
        if self._links.open:
            return
        if self._is_open:
            self._is_open = False
            self._unopened_since = now
            self._warn_at = now + WARN_AFTER_S
            self._on_reconnecting(error)
        elif now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            self._on_waiting(error, now - self._unopened_since)
        pause_s = self._backoff.next_s()
        self._enter_at = now + pause_s
        if self._timeout_s is not None and now + pause_s - self._unopened_since >= self._timeout_s:
            self._error = self._error or error

    def _is_for_good(self, link: SiloLink, owner: OwnerSilo | None, error: HeadraceError) -> bool:
        if error.retryable or link.superseded:
            return False
        if isinstance(error, Busy) and (self._was_open if owner is None else owner.was_reached):
            return False
        opens = any(not each.is_open for each in self._links.present)
        if isinstance(error, Fenced) and opens and not self._stays_direct:
            return False  # the session that is opening may have replaced this one: its silo is not known yet
        return link.is_open or not link.expected or self._stays_direct


def _give_up(link: SiloLink, task: asyncio.Task[HeadraceError | None]) -> None:
    """Cancel a session that is still opening."""
    if not link.is_open:
        task.cancel()
