"""Remote consumers of simulated silos: each has a link to every silo, over which batches, credit and acknowledgements
go in order, until it breaks. They acknowledge late, in parts, out of order, reject, and vanish."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace import StreamId
from headrace.agents import Edge, Events, Group, Member
from headrace.streams.frames import Delivered, split

if TYPE_CHECKING:
    from tests.cluster.simulated import Silo, World

CREDIT_BYTES = 1 << 30
TIMEOUT_S = 5.0
RECONNECT_S = 0.5
WAIT_S = 0.2
"""Seconds after which a message to or from a silo that is cut off is tried again."""


class Way:
    """One direction of a link: messages arrive in order."""

    def __init__(self, link: "Link", receiver: Callable[[Callable[[], None]], None]) -> None:
        self._link = link
        self._receiver = receiver
        self._under_way: deque[Callable[[], None]] = deque()
        self._last = 0.0

    def send(self, message: Callable[[], None]) -> None:
        world = self._link.world
        self._under_way.append(message)
        self._last = max(self._last, world.now + world.weather.latency_s * world.rng.random())
        world.call_at(self._last, self._arrives)

    def _arrives(self) -> None:
        """Called once for each message."""
        link = self._link
        if not link.up:
            return
        if link.silo.cut_off:
            link.world.call_at(link.world.now + WAIT_S, self._arrives)
        else:
            self._receiver(self._under_way.popleft())


class Link:
    """A connection of a consumer to the group at one silo."""

    def __init__(self, consumer: "Consumer", silo: "Silo", group: Group) -> None:
        self.world = consumer.world
        self.consumer = consumer
        self.silo = silo
        self.group = group
        self.up = True
        self.member: Member | None = None
        self._number = 0
        self._to_silo = Way(self, self._at_silo)
        self._to_consumer = Way(self, lambda message: message())
        self._to_silo.send(self._join)

    def _at_silo(self, message: Callable[[], None]) -> None:
        """Deliver a message to the silo. It waits while the silo is paused."""
        asyncio.get_running_loop().call_soon(lambda: self.up and message(), context=self.silo.machine.context)

    # ---- in the silo -----------------------------------------------------------------------------------------------

    def _join(self) -> None:
        if not self.silo.up or self.silo.groups.get(self.group.definition.name) is not self.group:
            self.ends()
            return
        member = self.member = self.group.join(self.consumer.name, TIMEOUT_S)
        self._number = member.connections
        member.on_outbox = self._send_soon
        member.on_gone = lambda _: self.ends()
        self.silo.links.append(self)

    @property
    def _mine(self) -> bool:
        member = self.member
        return member is not None and member.connections == self._number and member.attached

    def hear(self) -> None:
        """A sign of life has come."""
        if self.up and self._mine and not self.silo.cut_off and not self.consumer.vanished and self.member is not None:
            self.group.heard(self.member)

    def _send_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        if not (self.up and self._mine):
            return
        assert self.member is not None
        message = b"".join(self.member.collect())
        self._to_consumer.send(lambda: self.consumer.receives(self, message))
        if self.group.sent(self.member):
            self._send_soon()

    def _grant(self, events: int) -> None:
        if self._mine:
            assert self.member is not None
            self.group.grant(self.member, events, CREDIT_BYTES // 1000)

    def _acknowledge(self, stream: StreamId, events: Events) -> None:
        if not self._mine:
            return
        assert self.member is not None
        left = self._left(events)
        if self.group.acknowledge(self.member, events) and not self.silo.machine.gone:
            self.world.model.finishes(self.group.definition.name, events.queue, events.offset, left, self.silo)

    def _left(self, events: Events) -> list[int]:
        """Indexes of those that it holds."""
        assert self.member is not None
        parcel = self.member.in_flight.get((events.queue, events.offset))
        indexes = parcel.left(parcel.find(events.offset)) if parcel is not None else []
        return [index for index in indexes if events.index <= index < events.index + events.count]

    def _reject(self, events: Events, delay_s: float) -> None:
        if self._mine:
            assert self.member is not None
            self.group.reject(self.member, events, "on purpose", delay_s)

    def ends(self) -> None:
        """It breaks; both sides see it, now or later."""
        if not self.up:
            return
        self.up = False
        if self._mine and not self.silo.machine.gone:
            assert self.member is not None
            self.group.disconnect(self.member)
        if self in self.silo.links:
            self.silo.links.remove(self)
        self.consumer.lost(self)

    # ---- at the consumer -------------------------------------------------------------------------------------------

    def breaks(self) -> None:
        """The consumer sees it at once, the silo when it can."""
        self.consumer.lost(self)
        if self.silo.machine.gone:
            self.up = False
        else:
            asyncio.get_running_loop().call_soon(self.ends, context=self.silo.machine.context)

    def grant(self, events: int) -> None:
        self._to_silo.send(lambda: self._grant(events))

    def acknowledge(self, stream: StreamId, events: Events) -> None:
        self._to_silo.send(lambda: self._acknowledge(stream, events))

    def reject(self, events: Events, delay_s: float) -> None:
        self._to_silo.send(lambda: self._reject(events, delay_s))


class Consumer:
    """A process that consumes one subscription."""

    def __init__(self, world: "World", name: str, subscription: str) -> None:
        self.world = world
        self.name = name
        self.subscription = subscription
        self.vanished = False
        self.links: dict[str, Link] = {}
        rng = world.rng
        self._credit = rng.choice((3, 20, 1000))
        self._pace_s = rng.choice((0.0, 0.05, 0.5))
        for silo in world.silos.values():
            self.found(silo)

    def found(self, silo: "Silo") -> None:
        """A silo serves the subscription."""
        group = silo.groups.get(self.subscription)
        if not self.vanished and silo.up and silo.name not in self.links and group is not None:
            link = self.links[silo.name] = Link(self, silo, group)
            link.grant(self._credit)

    def lost(self, link: Link) -> None:
        if self.links.get(link.silo.name) is link:
            del self.links[link.silo.name]
            self.world.later(RECONNECT_S, lambda: self._look(link.silo.name))

    def _look(self, name: str) -> None:
        if (silo := self.world.silos.get(name)) is not None:
            self.found(silo)

    def vanish(self) -> None:
        """Fall silent, with all connections left open, like a machine that lost its power."""
        self.vanished = True

    def receives(self, link: Link, message: bytes) -> None:
        rng, pause_s = self.world.rng, 0.0
        for delivered in split(message)[0]:
            pause_s += self._pace_s * rng.random()
            self.world.later(pause_s, lambda delivered=delivered: self._works(link, delivered))

    def _works(self, link: Link, delivered: Delivered) -> None:
        if self.vanished or not link.up:
            return
        rng, stream, count = self.world.rng, delivered.batch.stream, delivered.batch.count
        indexes = list(range(count)) if delivered.indexes is None else list(delivered.indexes)
        where = delivered.queue, delivered.batch.offset
        if rng.random() < 0.03:
            at = rng.randrange(count)
            for index in indexes[:at]:
                link.acknowledge(stream, Events(*where, index, 1))
            link.reject(Events(*where, indexes[at], 1), rng.choice((0.0, 0.3)))
        elif rng.random() < 0.3:
            for index in rng.sample(indexes, count):
                self.world.later(
                    self._pace_s * rng.random(),
                    lambda index=index: link.up and link.acknowledge(stream, Events(*where, index, 1)),
                )
        else:
            link.acknowledge(stream, Events(*where, indexes[0], indexes[-1] - indexes[0] + 1))
        link.grant(count)


class WatchedEdge(Edge):
    """Tells the world which events are handed out."""

    def __init__(self, silo: "Silo") -> None:
        super().__init__()
        self._silo = silo

    def put(self, member: Member, frame: bytes) -> None:
        if not self._silo.machine.gone:
            for delivered in split(frame)[0]:
                self._silo.hands_out(member, delivered)
        super().put(member, frame)


def pick(rng: random.Random, consumers: list[Consumer]) -> Consumer | None:
    present = [consumer for consumer in consumers if not consumer.vanished]
    return rng.choice(present) if present else None
