"""Decides which silos the balancer may use: members, silos that are away for a short time, and newcomers.

Requirements:
- The restart of a silo under its name moves no queues between other silos. So a rolling restart moves each queue at
  most twice: away and back.
- A new silo takes over no queue before it has been present for `maturity_s`.
- Silos that start a cluster together do not wait for each other.
- A member stays a member as long as it is present.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..streams.cluster import SiloRecord, SiloState


class EligibleSilos(NamedTuple):
    """The silos that can serve a provider, by name. The fields are those of `Placement`."""

    members: Sequence[str]
    away: Sequence[str]
    newcomers: Sequence[str]


def eligible_silos(
    silos: Sequence[SiloRecord],
    provider: str,
    now_us: int,
    *,
    known: Collection[str],
    maturity_s: float,
    silent_s: float,
) -> EligibleSilos:
    """Return the silos that can serve `provider`. All times are the store's.

    - A silo is present if it is ACTIVE and its last heartbeat is at most `silent_s` ago. This is the length of a lease:
      after a longer silence it holds no queues.
    - A silo is away if it is not present, and its last heartbeat is less than `maturity_s` ago. Later it is ignored.
    - A silo is new if it joined less than `maturity_s` ago. It is not new if it is `known`, that is, was a member
      before (the values of the homes), or if it joined within `maturity_s` of the first silo. New silos are newcomers
      as long as one present silo is not new.
    """
    maturity_us, silent_us = int(maturity_s * 1e6), int(silent_s * 1e6)
    able = [silo for silo in silos if provider in silo.serves]
    present = [silo for silo in able if silo.state is SiloState.ACTIVE and now_us - silo.heartbeat_at_us <= silent_us]
    recent = [silo for silo in able if silo in present or now_us - silo.heartbeat_at_us < maturity_us]
    founded_us = min((silo.joined_at_us for silo in recent), default=0)

    def mature(silo: SiloRecord) -> bool:
        seen_us = now_us if silo in present else silo.heartbeat_at_us
        since_us = silo.joined_at_us
        return silo.name in known or since_us - founded_us < maturity_us or seen_us - since_us >= maturity_us

    members = sorted(silo.name for silo in present if mature(silo))
    away = sorted(silo.name for silo in recent if silo not in present and mature(silo))
    newcomers = sorted(silo.name for silo in present if not mature(silo))
    return EligibleSilos(members, away, newcomers) if members else EligibleSilos(newcomers, away, [])
