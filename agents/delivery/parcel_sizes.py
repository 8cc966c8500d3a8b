"""The sizes of parcels for concurrent consumers. Pure."""

from __future__ import annotations

PARCEL_S = 1.0
"""How long a concurrent consumer works on a parcel at most, in seconds."""
FIRST_EVENT_S = 0.1
"""Assumed time per event until parcels are done, in seconds: the first parcels are small."""
MIN_EVENT_S = 1e-6
SIZES = 16
"""Number of different sizes of parcels."""
NEWEST_SHARE = 0.1
"""Weight of the newest parcel in the average time per event."""


class ParcelSizes:
    """Chooses the size of a parcel from the time that consumers took for former ones."""

    def __init__(self) -> None:
        self._event_s = FIRST_EVENT_S
        """Moving average of the time that consumers take for a parcel, in seconds per event."""
        self._parcels = 0

    def note_duration(self, seconds: float, events: int) -> None:
        """A parcel of so many events is done."""
        event_s = max(seconds / events, MIN_EVENT_S)
        self._event_s += (event_s - self._event_s) * NEWEST_SHARE

    def next_events(self) -> int:
        """Return the most events of the next parcel for a concurrent consumer.

        With larger parcels, slow streams would hold all of its credit, while handlers of other streams could run. The
        sizes differ by up to a third, so that parcels handed out together do not end together.
        """
        self._parcels += 1
        seconds = PARCEL_S * (1 - self._parcels % SIZES / (3 * SIZES))
        return max(int(seconds / self._event_s), 1)
