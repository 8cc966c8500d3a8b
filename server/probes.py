"""The standard services, for load balancers and tools: grpc.health.v1, and reflection (v1 and v1alpha)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

from ..streams.errors import NotFound
from .guard import CallGuard
from .methods import MethodKind, ServiceCall, ServiceMethod, parsed

HEALTH = "grpc.health.v1.Health"
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""The two versions have the same messages."""


class HealthReporter:
    """Reports which services are open. The name "" stands for all services."""

    def __init__(self, guard: CallGuard) -> None:
        self._guard = guard

    def methods(self) -> list[ServiceMethod]:
        return [
            ServiceMethod(f"{HEALTH}/Check", MethodKind.UNARY, self._check, probe=True),
            ServiceMethod(f"{HEALTH}/Watch", MethodKind.RESPONSES, self._watch, probe=True),
        ]

    async def _check(self, call: ServiceCall, request: bytes) -> bytes:
        service = parsed(health_pb2.HealthCheckRequest, request).service
        serving = self._serving(service)
        if serving is None:
            raise NotFound(f"there is no service {service!r} at this silo")
        return _status(serving)

    async def _watch(self, call: ServiceCall, request: bytes) -> None:
        service = parsed(health_pb2.HealthCheckRequest, request).service
        last = b""
        while True:
            change = self._guard.change
            if (now := _status(self._serving(service))) != last:
                await call.write(now)
                last = now
            if call.closing.is_set():
                return
            await change.wait()

    def _serving(self, service: str) -> bool | None:
        """Whether the service is open; None if there is no such service."""
        services = self._guard.services
        return services.get(service) if service else any(services.values())


def _status(serving: bool | None) -> bytes:
    kind = health_pb2.HealthCheckResponse
    status = kind.SERVICE_UNKNOWN if serving is None else kind.SERVING if serving else kind.NOT_SERVING
    return kind(status=status).SerializeToString()


def reflection_methods(services: Sequence[str]) -> list[ServiceMethod]:
    """Return the methods of reflection, which describe these services and reflection itself."""
    servicer: Any = aio.ReflectionServicer([*services, *REFLECTION])

    async def reflect(call: ServiceCall) -> None:
        async for response in servicer.ServerReflectionInfo(_requests(call), None):
            await call.write(response.SerializeToString())

    return [
        ServiceMethod(f"{name}/ServerReflectionInfo", MethodKind.STREAM, reflect, probe=True) for name in REFLECTION
    ]


async def _requests(call: ServiceCall) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    while (message := await call.read()) is not None:
        yield parsed(reflection_pb2.ServerReflectionRequest, message)
