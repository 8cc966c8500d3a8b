"""What concerns grpc in the whole process. Import this before grpc, which reads the variables that are set here.

Whoever sets GRPC_VERBOSITY or GRPC_ENABLE_FORK_SUPPORT gets what it says.
"""

from __future__ import annotations

import os

from .errors import NotSupported

# It would write to stderr what becomes an error anyway, such as a handshake that failed.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Its handlers of fork are not made for its asyncio side: with them one forked process in eight crashes at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_used_by: set[int] = set()
"""Ids of the processes that have used it: this one, and those from which it was forked."""


def use_grpc() -> None:
    """Call this before anything of grpc is opened. Raises NotSupported in a process that was forked from one that has
    used it: the threads of grpc stayed there, and any call here would crash or wait for ever."""
    _used_by.add(os.getpid())
    if len(_used_by) > 1:
        raise NotSupported(
            "this process was forked from one that has opened a client or a silo's gRPC, which grpc does not survive: "
            "start processes with spawn, or fork before the first one is opened"
        )
