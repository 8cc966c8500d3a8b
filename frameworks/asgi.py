"""The lifespan of an ASGI application: it opens providers, serves the declared subscriptions, and closes in order.

    shop = AppProvider("data")
    app = FastAPI(lifespan=lifespan(shop, modules=["shop.handlers"]))

Several workers may do so with one data directory: for each subscription one serves, and the others stand by.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Unpack

from ..silo.options import ProviderKeywords, ProviderOptions
from ..silo.provider import Provider
from ..silo.subscription_host import DRAIN_S
from ..silo.user_modules import declared_subscriptions
from ..streams.arguments import check_options, check_seconds
from ..streams.errors import Busy, Closed, InvalidArgument, NotFound, NotSupported
from ..streams.handlers import SubscriptionDeclaration


class AppProvider:
    """A provider that the lifespan of an application opens. Call it in a request or a handler to get the `Provider`: it
    serves as a dependency, too, as in `Depends(shop)`."""

    def __init__(self, data: str | os.PathLike[str] | None = None, **options: Unpack[ProviderKeywords]) -> None:
        """The arguments are those of `Provider.open`. Raises InvalidArgument."""
        check_options("AppProvider", options, ProviderKeywords.__annotations__)
        self.name = ProviderOptions(**options).name
        self._open = partial(Provider.open, data, **options)
        self._provider: Provider | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> Provider:
        """Return the open provider. Raise Closed outside of the application's lifespan, NotSupported in another event
        loop than that of the lifespan."""
        if self._provider is None:
            raise Closed(
                f"provider {self.name!r} is not open: let the server run the application's lifespan, and give this "
                "provider to `headrace.frameworks.lifespan`"
            )
        if self._loop is not _running_loop(self._loop):
            raise NotSupported(f"provider {self.name!r} belongs to another event loop: call it in that of the lifespan")
        return self._provider

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Provider]:
        """Open the provider for the length of an `async with`. Raises as `Provider.open`, and Busy if it is open."""
        if self._provider is not None:
            raise Busy(f"provider {self.name!r} is open already: give each application a provider of its own")
        async with self._open() as provider:
            self._provider, self._loop = provider, asyncio.get_running_loop()
            try:
                yield provider
            finally:
                self._provider = self._loop = None


def lifespan(
    *providers: AppProvider, modules: Sequence[str] = (), drain_s: float = DRAIN_S
) -> Callable[[object], AbstractAsyncContextManager[None]]:
    """Return the lifespan of an application, for FastAPI, Starlette and Litestar.

    It opens `providers`, imports `modules`, and serves all subscriptions that are declared with `@subscription`. At the
    end running handlers have `drain_s` seconds to end, and progress is saved; the providers are closed after that, so
    that these handlers can publish to all of them.

    Raises InvalidArgument. When entered, also InvalidArgument for a module that cannot be imported and for a
    subscription of another provider, and the errors of `Provider.open` and `Provider.subscribe`.
    """
    check_seconds("drain_s", drain_s)
    names = [one.name for one in providers]
    if not providers or len(set(names)) < len(names):
        raise InvalidArgument(
            f"lifespan: expected one or more providers with different names, not {names}: write "
            "lifespan(AppProvider('data'))"
        )

    @asynccontextmanager
    async def run(_application: object = None) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            opened = {one.name: await stack.enter_async_context(one.opened()) for one in providers}
            declared = await asyncio.to_thread(declared_subscriptions, modules, names)
            served: list[SubscriptionDeclaration] = []
            stack.push_async_callback(_withdraw_all, served, opened, drain_s)
            for one in declared:
                await opened[one.provider].attach(one)
                served.append(one)
            yield

    return run


async def _withdraw_all(
    served: Sequence[SubscriptionDeclaration], providers: Mapping[str, Provider], drain_s: float
) -> None:
    """Stop serving at the same time. Raise the first error when all have stopped."""
    withdrawing = [_withdraw(providers[one.provider], one.definition.name, drain_s) for one in served]
    for outcome in await asyncio.gather(*withdrawing, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def _withdraw(provider: Provider, name: str, drain_s: float) -> None:
    with suppress(NotFound):  # it was deleted
        await provider.withdraw(name, drain_s)


def _running_loop(otherwise: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop | None:
    """Return the event loop of this thread, or `otherwise` if it runs none, as in the threads of a framework."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return otherwise
