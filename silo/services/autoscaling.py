"""ExternalScaler: KEDA, an autoscaler of Kubernetes, asks for the lag of a subscription, and runs as many consumers as
that needs. See docs/deployment.md.

KEDA sends no metadata with its calls, so a token is in the metadata of the trigger. Each method checks it itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from ...proto.keda import externalscaler_pb2 as pb
from ...server.access import Principal
from ...server.guard import CallGuard
from ...server.methods import MethodKind, ServiceCall, ServiceMethod, parsed
from ...streams.errors import InvalidArgument, NotFound, NotSupported
from ...streams.subscriptions import SubscriptionDefinition
from ..provider_core import ProviderCore
from .lookup import TO_KNOW, Providers
from .subscriptions import positions_of
from .visible import sees_everything, selected_events

SERVICE = "externalscaler.ExternalScaler"
WATCH_S = 5.0
"""Interval at which StreamIsActive looks at the lag, in seconds."""
METRIC = "headrace-lag"
"""KEDA itself adds the number of the trigger."""
MAX_THRESHOLD = 1 << 53


class ScalingTarget(NamedTuple):
    """The metadata of a trigger."""

    provider: str
    subscription: str
    lag_threshold: int
    """Events for each consumer."""
    activation_lag_threshold: int
    """With more events than this, there is a consumer to run."""
    token: str
    """"": none."""


def target_of(metadata: Mapping[str, str]) -> ScalingTarget:
    """Return the target of a trigger. Raise InvalidArgument, which names the entry, if one is missing or wrong."""
    if not metadata.get("subscription"):
        raise InvalidArgument("subscription is missing in the metadata of the trigger: name the one to be scaled")
    return ScalingTarget(
        metadata.get("provider", "default"),
        metadata["subscription"],
        _threshold(metadata, "lagThreshold", least=1),
        _threshold(metadata, "activationLagThreshold", least=0, default="0"),
        metadata.get("tokenFromEnv") or metadata.get("token", ""),
    )


def _threshold(metadata: Mapping[str, str], name: str, *, least: int, default: str = "") -> int:
    text = metadata.get(name, default)
    if not (text.isascii() and text.isdigit() and least <= int(text) <= MAX_THRESHOLD):
        raise InvalidArgument(
            f"{name} is {text!r} in the metadata of the trigger: write a number of events in quotes, at least {least}"
        )
    return int(text)


class ExternalScaler:
    """Answers for all silos: the stored progress and the queues tell the lag, also while no consumer runs."""

    def __init__(self, providers: Providers, guard: CallGuard, *, watch_s: float = WATCH_S) -> None:
        self._providers = providers
        self._guard = guard
        self._watch_s = watch_s

    def methods(self) -> list[ServiceMethod]:
        return [
            ServiceMethod(f"{SERVICE}/IsActive", MethodKind.UNARY, self.is_active, probe=True),
            ServiceMethod(f"{SERVICE}/StreamIsActive", MethodKind.RESPONSES, self.watch, probe=True),
            ServiceMethod(f"{SERVICE}/GetMetricSpec", MethodKind.UNARY, self.metric_spec, probe=True),
            ServiceMethod(f"{SERVICE}/GetMetrics", MethodKind.UNARY, self.metrics, probe=True),
        ]

    async def is_active(self, call: ServiceCall, message: bytes) -> bytes:
        target = target_of(parsed(pb.ScaledObjectRef, message).scalerMetadata)
        return _active(target, await self._lag(target))

    async def watch(self, call: ServiceCall, message: bytes) -> None:
        target = target_of(parsed(pb.ScaledObjectRef, message).scalerMetadata)
        last = b"?"
        while not call.closing.is_set():
            if (now := _active(target, await self._lag(target))) != last:
                await call.write(now)
                last = now
            try:
                async with asyncio.timeout(self._watch_s):
                    await call.closing.wait()
            except TimeoutError:
                continue

    async def metric_spec(self, call: ServiceCall, message: bytes) -> bytes:
        target = target_of(parsed(pb.ScaledObjectRef, message).scalerMetadata)
        wanted = target.lag_threshold
        spec = pb.MetricSpec(metricName=METRIC, targetSize=wanted, targetSizeFloat=wanted)
        return pb.GetMetricSpecResponse(metricSpecs=[spec]).SerializeToString()

    async def metrics(self, call: ServiceCall, message: bytes) -> bytes:
        target = target_of(parsed(pb.GetMetricsRequest, message).scaledObjectRef.scalerMetadata)
        lag = await self._lag(target)
        value = pb.MetricValue(metricName=METRIC, metricValue=lag, metricValueFloat=lag)
        return pb.GetMetricsResponse(metricValues=[value]).SerializeToString()

    async def _lag(self, target: ScalingTarget) -> int:
        """Return the events from the first one that is not finished to the end of each queue, without paused streams.

        An adapter that does not count events has its batches counted. A token that may not know the numbers of others
        gets the number of those that the subscription selects. Raises Unauthenticated, PermissionDenied, NotFound, and
        NotSupported for such a token if the queues cannot be read twice.
        """
        principal, provider, definition = await self._subscription(target)
        found, adapter, sees_all = 0, provider.adapter, sees_everything(principal)
        if not sees_all and not adapter.capabilities.rewindable:
            raise NotSupported(
                f"the queues of provider {provider.name!r} tell only the lag of all clients together: give the trigger "
                "a token that may subscribe to or manage */*"
            )
        for queue, position in (await positions_of(provider, definition)).items():
            if not sees_all:
                found += await selected_events(adapter, queue, position, definition.selector)
                continue
            backlog = await adapter.backlog(queue, position)
            found += backlog.batches if backlog.events is None else backlog.events
        return found

    async def _subscription(self, target: ScalingTarget) -> tuple[Principal, ProviderCore, SubscriptionDefinition]:
        authorization = f"Bearer {target.token}" if target.token else None
        await self._guard.authenticator.prepare(authorization)
        principal = self._guard.authenticator.authenticate(authorization)
        principal.require_somewhere(*TO_KNOW)
        provider = self._providers.get(target.provider)
        if provider is None:
            raise NotFound(f"this silo has no provider {target.provider!r}: name one of its configuration")
        stored = {one.name: one for one in await provider.store.subscriptions(provider.name)}
        definition = stored.get(target.subscription)
        principal.require_subscription(TO_KNOW, target.subscription, definition and definition.selector.pattern)
        assert definition is not None
        return principal, provider, definition


def _active(target: ScalingTarget, lag: int) -> bytes:
    return pb.IsActiveResponse(result=lag > target.activation_lag_threshold).SerializeToString()
