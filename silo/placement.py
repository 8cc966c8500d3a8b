"""The placement: which silo owns which queue, and where clients reach the silo. It is pushed to direct sessions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ..proto.v1 import consumer_pb2 as pb
from ..streams.cluster import LIVING, ClusterView, SiloRecord

PlacementCallback = Callable[[pb.Placement], None]


class _Watch(NamedTuple):
    """A session that follows the placement."""

    provider: str
    queues: Collection[int]
    on_placement: PlacementCallback


class LeaseOwner(NamedTuple):
    """The lease of a queue."""

    epoch: int
    silo: str
    """Name of the owner; "" if the lease is over."""


_UNKNOWN = LeaseOwner(0, "")


class ClusterPlacements:
    """The owners of all queues, as this silo knows them."""

    def __init__(self) -> None:
        self.silo = ""
        """The name of this silo; "" before it joins its cluster."""
        self._owners: Mapping[tuple[str, int], LeaseOwner] = {}
        self._silos: Mapping[str, SiloRecord] = {}
        self._watches: dict[int, tuple[_Watch, pb.Placement]] = {}
        """By number, with the placement that was pushed last."""
        self._last = 0

    def join(self, silo: str) -> None:
        """This silo joins its cluster under a name."""
        self.silo = silo

    def update(self, view: ClusterView) -> None:
        """Take a new view of the cluster. Push what changed."""
        valid = {(lease.provider, lease.queue): lease.owner for lease in view.valid}
        self._silos = {silo.name: silo for silo in view.silos if silo.state in LIVING}
        self._owners = {
            queue: LeaseOwner(lease.epoch, valid.get(queue, ""))
            for lease in view.leases
            if (queue := (lease.provider, lease.queue))
        }
        for number, (watch, before) in list(self._watches.items()):
            placement = self.placement(watch.provider, watch.queues)
            if placement != before and number in self._watches:
                self._watches[number] = watch, placement
                watch.on_placement(placement)

    def owner(self, provider: str, queue: int) -> LeaseOwner:
        """Return the owner of a queue, and its epoch: 0 if no lease is known."""
        return self._owners.get((provider, queue), _UNKNOWN)

    def placement(self, provider: str, queues: Collection[int]) -> pb.Placement:
        """Return the owners of these queues."""
        placement = pb.Placement(queues=len(queues))
        for queue in queues:
            if (known := self._owners.get((provider, queue))) is None:
                continue
            owner = placement.owners.add(queue=queue, epoch=known.epoch)
            if (silo := self._silos.get(known.silo)) is not None:
                owner.silo, owner.address = silo.name, silo.public_address or silo.address
        return placement

    def watch(self, provider: str, queues: Collection[int], on_placement: PlacementCallback) -> Callable[[], None]:
        """Call `on_placement` at once, and whenever the owners of these queues change, until the returned function is
        called."""
        self._last = number = self._last + 1
        placement = self.placement(provider, queues)
        self._watches[number] = _Watch(provider, queues, on_placement), placement
        on_placement(placement)

        def stop() -> None:
            self._watches.pop(number, None)

        return stop
