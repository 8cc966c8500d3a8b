"""The demo's verdict: compares the deliveries to the jobs with the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .flights import CarrierDelays


class DeliveryTally(NamedTuple):
    """Counts of the deliveries to one subscription."""

    delivered: int
    """Deliveries, repeated ones included."""
    duplicates: int
    """Repeated deliveries of an event."""
    out_of_order: int
    """First deliveries of an event after a later event of the same stream."""
    missing: int
    """Events never delivered."""

    def good(self, *, duplicates_allowed: bool) -> bool:
        return not self.missing and not self.out_of_order and (duplicates_allowed or not self.duplicates)


def tally(rows: Iterable[int], keys: Sequence[str]) -> DeliveryTally:
    """Count the deliveries in `rows`, the row numbers in order of delivery. `keys` has the stream key of each row.

    A row number that does not exist counts as a duplicate, because it is one delivery too many.
    """
    seen = bytearray(len(keys) + 1)
    newest: dict[str, int] = {}
    delivered = duplicates = out_of_order = 0
    for row in rows:
        delivered += 1
        if not 0 < row < len(seen) or seen[row]:
            duplicates += 1
            continue
        seen[row] = 1
        key = keys[row - 1]
        if row < newest.get(key, 0):
            out_of_order += 1
        else:
            newest[key] = row
    return DeliveryTally(delivered, duplicates, out_of_order, len(keys) - (delivered - duplicates))


def differences(found: Mapping[str, CarrierDelays], expected: Mapping[str, CarrierDelays]) -> list[str]:
    """One line for each carrier whose numbers differ from the file."""
    none = CarrierDelays()
    return [
        f"carrier {carrier}: {_text(found.get(carrier, none))}, but by the file {_text(expected.get(carrier, none))}"
        for carrier in sorted({*found, *expected})
        if found.get(carrier) != expected.get(carrier)
    ]


def _text(delays: CarrierDelays) -> str:
    return f"{delays.flights:,} flights, {delays.departed:,} departed, {delays.mean:.2f} minutes late on average"
