"""The pytest plugin: the fixture `headrace`, and async tests that run in its event loop.

pytest loads this module in each run, also for tests that do not use it. So it imports the rest only for the fixture.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from ..silo.options import ProviderKeywords
    from .provider import TestProvider
    from .runner import VirtualTimeRunner

FIXTURE = "headrace"
_OTHER_PLUGINS = ("asyncio", "anyio")
"""Markers with which other plugins choose the async tests that they run."""


@pytest.fixture
def headrace_options() -> ProviderKeywords:
    """The options of `Provider.open` for the provider of a test. Override it in a module or a `conftest.py`."""
    return {}


@pytest.fixture
def _headrace_runner() -> Iterator[VirtualTimeRunner]:
    """The event loop of a test. It is there before the provider, for async fixtures that `headrace_options` uses."""
    from .runner import VirtualTimeRunner  # noqa: PLC0415 (as below)

    with VirtualTimeRunner() as runner:
        yield runner


@pytest.fixture
def headrace(headrace_options: ProviderKeywords, _headrace_runner: VirtualTimeRunner) -> Iterator[TestProvider]:
    """A provider in memory, in virtual time. An async test that uses it runs in the provider's event loop."""
    from .provider import opened_in  # noqa: PLC0415 (it loads the whole engine)

    with opened_in(_headrace_runner, headrace_options) as provider:
        yield provider


class HeadraceFunction(pytest.Function):
    """An async test that uses the fixture. It runs in the provider's event loop, whichever other plugins there are."""

    def get_closest_marker(self, name: str, default: Any = None) -> Any:
        return default if name in _OTHER_PLUGINS else super().get_closest_marker(name, default)

    def runtest(self) -> None:
        test: Any = self.obj
        provider: Any = self.funcargs[FIXTURE]

        @functools.wraps(test)
        def call(**arguments: Any) -> None:
            __tracebackhide__ = True
            provider.run(test(**arguments))

        from .runner import WaitsForeverError  # noqa: PLC0415 (as above)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "obj", call)
            try:
                return super().runtest()
            except WaitsForeverError as error:
                problem = str(error)
        pytest.fail(problem, pytrace=False)  # it says where the test waits


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Take the async tests that use the fixture, after other plugins have chosen theirs."""
    made = yield
    return [_own(item) for item in cast("list[Any]", made)] if isinstance(made, list) else made


def _own(item: Any) -> Any:
    if not isinstance(item, pytest.Function) or not _uses_fixture(item) or not inspect.iscoroutinefunction(item.obj):
        return item
    own = cast("Any", HeadraceFunction).from_parent(
        item.parent,
        name=item.name,
        callspec=getattr(item, "callspec", None),
        callobj=item.obj,
        fixtureinfo=item._fixtureinfo,  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] (as pytest-asyncio and anyio do)
        keywords=item.keywords,
        originalname=item.originalname,
    )
    own.own_markers = item.own_markers
    return own


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Generator[None, object, object]:
    """Run the async fixtures of a test that uses the fixture in the same event loop."""
    if fixturedef.scope != "function" or not _is_async(fixturedef.func) or not _uses_fixture(request.node):
        return (yield)
    runner: VirtualTimeRunner = request.getfixturevalue(_headrace_runner.__name__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixturedef, "func", _in_loop(fixturedef.func, request.instance, runner))
        return (yield)


def _uses_fixture(item: Any) -> bool:
    """Whether a test uses the fixture of this module, and not another one of this name."""
    info = getattr(item, "_fixtureinfo", None)
    for definition in reversed(() if info is None else info.name2fixturedefs.get(FIXTURE, ())):
        if definition.func.__module__ == __name__:
            return True
        if FIXTURE not in definition.argnames:
            return False
    return False


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _in_loop(function: Any, instance: object, runner: VirtualTimeRunner) -> Any:
    """Return a fixture function that runs an async one in the loop of the test."""
    if instance is not None and inspect.ismethod(function):
        function = function.__func__.__get__(instance)

    @functools.wraps(function)
    def value(*args: Any, **arguments: Any) -> Iterator[Any]:
        if inspect.iscoroutinefunction(function):
            yield runner.run(function(*args, **arguments))
            return
        values = function(*args, **arguments)
        yield runner.run(_next(values))
        with pytest.raises(StopAsyncIteration):  # else it yields more than once
            runner.run(_next(values))

    return value


async def _next(values: AsyncIterator[Any]) -> Any:
    return await anext(values)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the history of a failed test."""
    report = yield
    provider = getattr(item, "funcargs", {}).get(FIXTURE) if _uses_fixture(item) else None
    if report.when == "call" and report.failed and provider is not None and "History" not in report.longreprtext:
        report.sections.append(("headrace: history", provider.history()))
    return report
