"""An application whose workers publish numbers and write down which ones they handle, for tests that kill them."""

import os
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from headrace import Event, subscription
from headrace.frameworks import AppProvider, lifespan

shop = AppProvider("data")
handled = os.open("handled", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
Path(f"worker-{os.getpid()}").touch()


@subscription("count", "n/*", start="earliest")
async def count(event: Event) -> None:
    assert event.stream is not None
    assert event.token is not None
    line = f"{os.getpid()} {event.stream.key} {event.token.offset} {event.token.index} {event.payload.decode()}\n"
    os.write(handled, line.encode())


async def publish(request: Request) -> PlainTextResponse:
    """Publish the numbers from `first` on to one stream."""
    first, many = int(request.query_params["first"]), int(request.query_params["count"])
    numbers = [str(number).encode() for number in range(first, first + many)]
    await shop().stream("n", request.path_params["key"]).publish(numbers)
    return PlainTextResponse(str(os.getpid()))


app = Starlette(routes=[Route("/{key}", publish, methods=["POST"])], lifespan=lifespan(shop))
