"""`headrace.frameworks.lifespan` without a server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import Busy, Closed, InvalidArgument, NotFound, NotSupported, StreamId
from headrace.frameworks import AppProvider, lifespan

STREAM = StreamId("orders", "42")


async def test_a_provider_is_open_within_the_lifespan_only(tmp_path: Path) -> None:
    shop = AppProvider(tmp_path, queues=1)
    with pytest.raises(Closed, match="let the server run the application's lifespan"):
        shop()
    for number in range(2):  # a server of tests may run it again
        async with lifespan(shop)(None):
            assert (await shop().publish(STREAM, b"x")).offset == number
        with pytest.raises(Closed):
            shop()


async def test_a_lifespan_within_itself_is_refused(tmp_path: Path) -> None:
    shop = AppProvider(tmp_path)
    async with lifespan(shop)(None):
        with pytest.raises(Busy, match="is open already"):
            async with lifespan(shop)(None):
                pass
        assert shop().name == "default"


async def test_a_provider_is_not_given_to_another_event_loop(tmp_path: Path) -> None:
    shop = AppProvider(tmp_path)

    async def get() -> object:
        return shop()

    async with lifespan(shop)(None):
        with pytest.raises(NotSupported, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(get()))
        assert await asyncio.to_thread(shop) is shop()  # as dependencies are called


async def test_a_provider_that_cannot_be_opened_leaves_none_open(tmp_path: Path) -> None:
    shop, audit = AppProvider(tmp_path), AppProvider(tmp_path, name="audit", adapter="nosuch")
    with pytest.raises(NotFound):
        async with lifespan(shop, audit)(None):
            pass
    with pytest.raises(Closed):
        shop()


def test_wrong_arguments_are_refused_when_they_are_given(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="unknown option 'queue'"):
        AppProvider(tmp_path, queue=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(InvalidArgument, match="queues"):
        AppProvider(tmp_path, queues=0)
    for providers in ((), (AppProvider(tmp_path), AppProvider(tmp_path))):
        with pytest.raises(InvalidArgument, match="different names"):
            lifespan(*providers)
    with pytest.raises(InvalidArgument, match="drain_s"):
        lifespan(AppProvider(tmp_path), drain_s=-1)


async def test_a_module_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="module 'nosuch_handlers' cannot be imported"):
        async with lifespan(AppProvider(tmp_path), modules=["nosuch_handlers"])(None):
            pass


# Declarations stay until their process ends, so these run in processes of their own.

DRAIN = """
import asyncio
from headrace import Event, StreamId, subscription
from headrace.frameworks import AppProvider, lifespan

shop, audit = AppProvider("data"), AppProvider("data", name="audit")
begun = asyncio.Event()

@subscription("billing", "orders/*", start="earliest")
async def bill(event: Event) -> None:
    begun.set()
    await asyncio.sleep(0.2)
    await audit().publish(StreamId("bills", "42"), event.payload)

@subscription("audited", "bills/*", provider="audit", start="earliest")
async def note(event: Event) -> None:
    print("noted", event.payload.decode())

async def main(publishes):
    async with lifespan(shop, audit)(None):
        if publishes:
            await shop().publish(StreamId("orders", "42"), b"paid")
            await asyncio.wait_for(begun.wait(), 60)
        else:
            await audit().caught_up("audited")

asyncio.run(main(True))
asyncio.run(main(False))
"""


@pytest.mark.long
def test_a_handler_that_ends_while_the_server_stops_can_still_publish(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", DRAIN], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("noted paid\n", "")


OTHER = """
import asyncio
from headrace import Event, HeadraceError, subscription
from headrace.frameworks import AppProvider, lifespan

@subscription("billing", "orders/*", provider="other")
async def bill(event: Event) -> None: ...

async def main():
    async with lifespan(AppProvider("data"))(None):
        pass

try:
    asyncio.run(main())
except HeadraceError as error:
    print(error)
"""


@pytest.mark.long
def test_a_subscription_of_a_provider_that_the_application_lacks_is_named(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", OTHER], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == (
        "subscription 'billing' is declared for provider 'other', which is not configured: there is default\n"
    )
