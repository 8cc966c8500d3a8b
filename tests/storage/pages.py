"""The kinds of the bytes of LMDB's and SQLite's files, for tests that damage each kind.

LMDB's format is that of its 0.9 releases: a page begins with its number (8 bytes), padding (2), flags (2), and the
bounds of its free space (2 + 2), or the number of overflow pages (4).
"""

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

PAGE = 4096
BRANCH, LEAF, OVERFLOW = 1, 2, 4
BIG, SUBDATABASE = 1, 2
NO_PAGE = (1 << 64) - 1
_IN_ONE_PAGE = 100
Spans = Mapping[str, list[tuple[int, int]]]
"""By kind: where such bytes begin and end."""


def log_spans(data: bytes) -> Spans:
    """The kinds of bytes in data.mdb."""
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    metas = [_meta(data, page) for page in (0, 1)]
    _, free_root, main_root, last = max(metas)
    spans["meta page"] += [(page * PAGE, page * PAGE + 160) for page in (0, 1)]
    used = {0, 1}
    for root, what in ((free_root, "free list"), (main_root, "")):
        for start, end, kind, page in _tree(data, root, what):
            spans[kind].append((start, end))
            used.add(page)
    for page in range(2, last + 1):
        if page not in used:
            spans["free page"].append((page * PAGE, min((page + 1) * PAGE, len(data))))
    return {kind: [span for span in found if span[0] < span[1] <= len(data)] for kind, found in spans.items()}


def _meta(data: bytes, page: int) -> tuple[int, int, int, int]:
    """Transaction, roots of the free list and of the main database, last page."""
    at = page * PAGE + 16 + 24  # magic, version, address, map size
    free_root = struct.unpack_from("<Q", data, at + 40)[0]
    main_root = struct.unpack_from("<Q", data, at + 88)[0]
    last, transaction = struct.unpack_from("<QQ", data, at + 96)
    return transaction, free_root, main_root, last


def _tree(data: bytes, root: int, what: str) -> Iterator[tuple[int, int, str, int]]:
    """Start, end, kind and page of the parts of a tree."""
    if root == NO_PAGE:
        return
    at = root * PAGE
    flags, lower, _ = struct.unpack_from("<HHH", data, at + 10)
    kind = what or ("branch page" if flags & BRANCH else "leaf page")
    yield at, at + lower, f"{kind}, header", root
    for number in range((lower - 16) // 2):
        node = at + struct.unpack_from("<H", data, at + 16 + 2 * number)[0]
        low, high, node_flags, key_size = struct.unpack_from("<HHHH", data, node)
        if flags & BRANCH:
            yield node, node + 8 + key_size, kind, root
            yield from _tree(data, low | high << 16 | node_flags << 32, what)
            continue
        size, content = low | high << 16, node + 8 + key_size
        yield node, content, f"{kind}, keys", root
        if node_flags & BIG:
            page = struct.unpack_from("<Q", data, content)[0]
            yield content, content + 8, f"{kind}, keys", root
            yield page * PAGE, page * PAGE + 16, "overflow page, header", page
            start = page * PAGE + 16
            yield start, start + 24, "block, header", page
            yield start + 24, start + size, "block", page
            for more in range(1, -(-(size + 16) // PAGE)):
                yield 0, 0, "block", page + more
        elif node_flags & SUBDATABASE:
            yield content, content + size, "database record", root
            yield from _tree(data, struct.unpack_from("<Q", data, content + 40)[0], what)
        else:
            yield content, content + size, what or ("block" if data[content : content + 3] == b"HRB" else "row"), root


def control_spans(data: bytes, payloads: Iterable[bytes]) -> Spans:
    """The kinds of bytes in control.db. Of long payloads, only the beginning: the rest is in other pages."""
    found = [(data.find(payload[:_IN_ONE_PAGE]), min(len(payload), _IN_ONE_PAGE)) for payload in payloads]
    return {
        "control store, payload": [(at, at + size) for at, size in found if at >= 0],
        "control store, header": [(0, 100)],
        "control store, page": [(page, page + PAGE) for page in range(0, len(data), PAGE)],
    }


def wal_spans(data: bytes) -> Spans:
    """The kinds of bytes in control.db-wal."""
    frames = range(32, len(data) - PAGE, PAGE + 24)
    return {
        "write-ahead log, header": [(0, 32)],
        "write-ahead log, frame header": [(at, at + 24) for at in frames],
        "write-ahead log, page": [(at + 24, at + 24 + PAGE) for at in frames],
    }
