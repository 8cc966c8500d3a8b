"""Results of `subscribe`: an awaitable with a handler, an async context manager without.

Both do nothing until they are used, and give a RuntimeWarning if they never are.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from .errors import InvalidArgument

_S = TypeVar("_S")


class ClosableConsumer(Protocol):
    """A consumer."""

    async def aclose(self) -> None: ...


_C = TypeVar("_C", bound=ClosableConsumer)


class HandlerOpening(Coroutine[Any, Any, _S]):
    """The result of `subscribe` with a handler: await it once. It wraps a coroutine, so Python warns if it is never
    awaited."""

    def __init__(self, coroutine: CoroutineType[Any, Any, _S], owner: str, name: str) -> None:
        """`owner` is "provider" or "client", `name` that of the subscription: messages and the warning show them."""
        self._coroutine = coroutine
        self._call = coroutine.__qualname__ = f"{owner}.subscribe"
        self._name = name

    def __await__(self) -> Generator[Any, Any, _S]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    if not TYPE_CHECKING:  # for callers without a type checker

        def __aenter__(self) -> NoReturn:
            self.close()
            raise InvalidArgument(
                f"subscription {self._name!r} has a handler: write `subscription = await {self._call}(...)`"
            )

        def __aexit__(self, *_: object) -> None: ...


class ConsumerOpening(Generic[_C]):
    """The result of `subscribe` without a handler: enter it with `async with`, which returns the consumer."""

    def __init__(self, open_consumer: Callable[[], Awaitable[_C]], owner: str, name: str) -> None:
        """`owner` is "provider" or "client", `name` that of the subscription: messages and the warning show them."""
        self._open_consumer = open_consumer
        self._call = f"{owner}.subscribe"
        self._name = name
        self._entered = False
        self._consumer: _C | None = None

    async def __aenter__(self) -> _C:
        self._entered = True
        self._consumer = await self._open_consumer()
        return self._consumer

    async def __aexit__(self, *_: object) -> None:
        if self._consumer is not None:
            await self._consumer.aclose()

    def __del__(self) -> None:
        if not self._entered:
            warnings.warn(
                f"{self._call}({self._name!r}, ...) without a handler was never entered: write "
                f"`async with {self._call}(...) as consumer`",
                RuntimeWarning,
                stacklevel=1,
                source=self,
            )

    if not TYPE_CHECKING:  # for callers without a type checker

        def __await__(self) -> NoReturn:
            self._entered = True
            raise InvalidArgument(
                f"subscription {self._name!r} has no handler: give one, or take batches with "
                f"`async with {self._call}(...) as consumer`"
            )

        def __aiter__(self) -> NoReturn:
            self._entered = True
            raise InvalidArgument(
                f"subscription {self._name!r} is not open: write `async with {self._call}(...) as consumer`, and in "
                "it `async for batch in consumer`"
            )
