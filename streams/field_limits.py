"""Limits of the fields that callers fill in: the same in Python, over gRPC and in Spark's sink.

`docs/grpc.md` lists them. A value above a limit is refused, and cut only if the list says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .errors import InvalidArgument

MIN_TIME_US, MAX_TIME_US = -62_135_596_800_000_000, 253_402_300_799_999_999
"""Times: the years 1 to 9999, as in Python, SQL and Parquet, in microseconds since 1970 UTC."""
MAX_ID_BYTES = 1024
"""Id of an event, in UTF-8 bytes."""
MAX_HEADERS = 128
"""Headers of one event."""
MAX_HEADERS_BYTES = 64 << 10
"""Names and values of the headers of one event together, in UTF-8 bytes."""
MAX_SELECTOR = 8192
"""Length of a selector's text, in characters: enough for the name of every stream, and quick to compile."""
MAX_ATTEMPTS = (1 << 31) - 1
"""Deliveries of one event, as the control store counts them."""
MAX_ELAPSED_S = 36_500 * 24 * 3600
"""`max_elapsed_s` of a retry policy, in seconds: 36,500 days."""
MAX_RETRY_DELAY_S = 30 * 24 * 3600
"""Longest delay between two attempts, in seconds: 30 days."""
MAX_MULTIPLIER = 1_000_000
MAX_OFFSET = (1 << 63) - 1
MAX_ID = (1 << 63) - 1
"""Limit of the id of a dead letter, as the control store counts them."""
MAX_STATE_VERSION = (1 << 31) - 1
"""Limit of the version of a state: its column has 32 bits."""


def check_times(times_us: Sequence[int], field: str = "timestamp_us") -> None:
    """Raise InvalidArgument if one of the times is not a number, or is outside of the years 1 to 9999."""
    try:
        lowest, highest = min(times_us), max(times_us)
        good = lowest >= MIN_TIME_US and highest <= MAX_TIME_US
    except TypeError:
        raise InvalidArgument(f"{field} is an integer of microseconds since 1970") from None
    if not good:
        wrong = lowest if lowest < MIN_TIME_US else highest
        raise InvalidArgument(
            f"{field} is a time in the years 1 to 9999, in microseconds since 1970: {wrong!r} is outside of them"
        )


def check_ids(ids: Collection[str]) -> None:
    """Raise InvalidArgument if the id of an event is longer than `MAX_ID_BYTES`."""
    longest = max(ids, key=len, default="")
    if 4 * len(longest) <= MAX_ID_BYTES:
        return  # true of nearly all: a character has at most 4 bytes
    size = max(len(each.encode("utf-8", "surrogatepass")) for each in ids)
    if size > MAX_ID_BYTES:
        raise InvalidArgument(f"the id of an event has at most {MAX_ID_BYTES:,} bytes in UTF-8, not {size:,}")


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise InvalidArgument if an event has more than `MAX_HEADERS` headers or `MAX_HEADERS_BYTES` bytes of headers."""
    if len(headers) > MAX_HEADERS:
        raise InvalidArgument(f"an event has at most {MAX_HEADERS} headers, not {len(headers):,}")
    characters = sum(map(len, headers)) + sum(map(len, headers.values()))
    if 4 * characters <= MAX_HEADERS_BYTES:
        return
    size = sum(len(text.encode("utf-8", "surrogatepass")) for item in headers.items() for text in item)
    if size > MAX_HEADERS_BYTES:
        raise InvalidArgument(
            f"the headers of an event have at most {MAX_HEADERS_BYTES:,} bytes in UTF-8, names and values together, "
            f"not {size:,}: put large values into the payload"
        )
