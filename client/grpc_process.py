"""Settings of grpc for the whole process. Import this module before grpc, which reads the variables set here.

Your own values of GRPC_VERBOSITY and GRPC_ENABLE_FORK_SUPPORT are kept.
"""

from __future__ import annotations

import os

from ..streams.errors import NotSupported

# grpc would write failures to stderr that headrace raises as errors, such as a failed handshake.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# The fork handlers of grpc do not support its asyncio API: with them, one forked process in eight crashes at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_used_by: set[int] = set()
"""Ids of the processes that have used grpc: this one, and its parents before the fork."""


def use_grpc() -> None:
    """Call this before opening anything of grpc.

    Raises NotSupported in a process that was forked after its parent had used grpc. The threads of grpc stayed in the
    parent, and any call in the fork would crash or wait forever.
    """
    _used_by.add(os.getpid())
    if len(_used_by) > 1:
        raise NotSupported(
            "this process was forked from one that has opened a client or a silo's gRPC, which grpc does not survive: "
            "start processes with spawn, or fork before the first one is opened"
        )
