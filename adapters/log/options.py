"""What a provider's table of options may say about its log."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

_Positive = Annotated[int, msgspec.Meta(gt=0)]


class LogOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the adapter `log`. Every process that opens the directory gives the same ones."""

    durability: Literal["commit", "relaxed"] = "commit"
    """`commit`: a publish returns after fsync. `relaxed`: fsync about each second; what was published survives the end
    of the process, not that of the machine."""

    map_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 1 << 40
    """The most that the log may ever hold, in bytes. It is address space, not disk or memory."""

    group_bytes: _Positive = 16 << 20
    """A commit takes no further calls after this many bytes; what was called later goes into the next."""

    retain_age_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Delete what is older than this, in seconds. None: age is no reason."""

    retain_bytes: _Positive | None = None
    """Delete the oldest of a queue that holds more bytes than this. None: size is no reason."""

    retain_unfinished: bool = True
    """True: never delete what a subscription has not finished. False: delete it too, and leave a gap record."""
