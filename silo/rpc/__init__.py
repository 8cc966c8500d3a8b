"""A silo's gRPC server: the services of `proto/v1/*.proto`, and the standard ones for health and reflection.

`server.serving` runs it. Every call comes in through `guard`, which knows who calls and what they may use, and says
what went wrong; behind it are the services: `publisher`, `consumer`, `subscriptions`, `cluster`. There are no generated
stubs: messages come and go as bytes, so that batches are passed on as they are.
"""

from ...streams import grpc_process  # noqa: F401 # pyright: ignore[reportUnusedImport] (it is to be imported before grpc)
