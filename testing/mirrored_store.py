"""The control store of a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..store.control_store import ControlStore
from ..streams.subscriptions import DeadLetter, GapRecord, Selector

_MAX_LETTERS = 1_000_000


class MirroredStore(ControlStore):
    """A control store that remembers its dead letters and gap records, so that assertions need not wait."""

    letters: Sequence[DeadLetter] = ()
    gap_records: Sequence[GapRecord] = ()

    async def add_dead_letters(
        self, letters: Sequence[DeadLetter], epoch: int | None, leases: Mapping[int, int] | None = None
    ) -> list[int]:
        added = await super().add_dead_letters(letters, epoch, leases)
        await self._mirror(letters[0].provider)
        return added

    async def finish_redrive(
        self, letter_id: int, *, delivered: bool, reason: str | None, attempts: int, failed_at_us: int
    ) -> None:
        provider = (await self.dead_letter(letter_id)).provider
        await super().finish_redrive(
            letter_id, delivered=delivered, reason=reason, attempts=attempts, failed_at_us=failed_at_us
        )
        await self._mirror(provider)

    async def delete_dead_letters(
        self, provider: str, subscription: str, ids: Sequence[int] | None = None, selector: Selector | None = None
    ) -> int:
        deleted = await super().delete_dead_letters(provider, subscription, ids, selector)
        await self._mirror(provider)
        return deleted

    async def add_gaps(
        self, records: Sequence[GapRecord], epoch: int | None = None, leases: Mapping[int, int] | None = None
    ) -> None:
        await super().add_gaps(records, epoch, leases)
        self.gap_records = await self.gaps(records[0].provider)

    async def _mirror(self, provider: str) -> None:
        self.letters = await self.dead_letters(provider, limit=_MAX_LETTERS)
