"""Which silos count for the balancer: who may have queues, who is awaited, who must wait.

Requirements: a restart of a silo under its name changes nobody else's queues, so that a rolling restart moves each
queue at most twice, away and back; a silo that is new takes nothing over before it has been there for `maturity_s`;
silos that start a cluster together do not wait for one another; who counts does not cease to count while it is there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..streams.cluster import SiloRecord, SiloState


class Standing(NamedTuple):
    """The silos that can serve a provider, by name. The fields are those of `Placement`."""

    members: Sequence[str]
    away: Sequence[str]
    newcomers: Sequence[str]


def standing(
    silos: Sequence[SiloRecord],
    provider: str,
    now_us: int,
    *,
    known: Collection[str],
    maturity_s: float,
    silent_s: float,
) -> Standing:
    """Who counts for `provider`. All times are the store's.

    - There is who is ACTIVE and was heard of within `silent_s` (the lease time: whoever is silent longer has no queue).
    - Away is who is not there, and was heard of within `maturity_s`. Later it counts as gone.
    - New is who joined less than `maturity_s` ago, unless it is `known` (was a member before: the values of the homes)
      or joined within `maturity_s` of the one who joined first. It waits as long as there is anybody who is not new.
    """
    maturity_us, silent_us = int(maturity_s * 1e6), int(silent_s * 1e6)
    able = [silo for silo in silos if provider in silo.serves]
    there = [silo for silo in able if silo.state is SiloState.ACTIVE and now_us - silo.heartbeat_at_us <= silent_us]
    recent = [silo for silo in able if silo in there or now_us - silo.heartbeat_at_us < maturity_us]
    founded_us = min((silo.joined_at_us for silo in recent), default=0)

    def mature(silo: SiloRecord) -> bool:
        seen_us = now_us if silo in there else silo.heartbeat_at_us
        since_us = silo.joined_at_us
        return silo.name in known or since_us - founded_us < maturity_us or seen_us - since_us >= maturity_us

    members = sorted(silo.name for silo in there if mature(silo))
    away = sorted(silo.name for silo in recent if silo not in there and mature(silo))
    newcomers = sorted(silo.name for silo in there if not mature(silo))
    return Standing(members, away, newcomers) if members else Standing(newcomers, away, [])
