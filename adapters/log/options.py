"""Options of a provider's log."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

_Positive = Annotated[int, msgspec.Meta(gt=0)]


class LogOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the adapter `log`. All processes that open the directory must use the same ones."""

    durability: Literal["commit", "relaxed"] = "commit"
    """`commit`: a publish returns after fsync. `relaxed`: fsync about once a second; published events survive the end
    of the process, but the last ones may not survive a power failure or a kernel panic."""

    map_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, le=1 << 62)] = 1 << 40
    """Largest size of the log, in bytes. It reserves address space only, neither disk nor memory."""

    group_bytes: _Positive = 16 << 20
    """A commit accepts no further calls once it has this many bytes; later calls go into the next commit."""

    retain_age_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Delete batches older than this, in seconds. None: do not delete by age."""

    retain_bytes: _Positive | None = None
    """Delete the oldest batches of a queue that holds more bytes than this. None: do not delete by size."""

    retain_unfinished: bool = True
    """True: never delete batches that a subscription has not finished. False: delete them too, and leave a gap
    record."""
