"""`headrace state`."""

from __future__ import annotations

import base64
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ...streams.errors import InvalidArgument
from ...streams.field_limits import MAX_STATE_VERSION
from ...streams.identity import StreamId
from ..interrupts import interrupts_kill
from .help import CommandGroup
from .output import json_option, note, print_json, print_table

if TYPE_CHECKING:
    from ...effects.administration import StoredState

MAX_SHOWN = 60
"""Characters of a state in a table."""

_database = click.option(
    "--database",
    "url",
    required=True,
    metavar="URL",
    help="postgresql://USER:PASSWORD@HOST/DATABASE or sqlite:///FILE.",
)
_origin = click.option("--origin", help="Id of the provider, if several have such a subscription.")


def _of_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options and arguments that name the state of a stream."""
    return _database(_origin(click.argument("subscription")(click.argument("stream")(function))))


@click.group("state", cls=CommandGroup)
def command() -> None:
    """States of streams, which handlers keep in a database of yours: list, show, set and delete them."""


@command.command("list")
@_database
@_origin
@click.option("--subscription", help="Only the states of this subscription.")
@click.option("--limit", type=click.IntRange(min=1), default=100, help="Number of states at most. Default: 100.")
@json_option
def list_(*, url: str, origin: str | None, subscription: str | None, limit: int, as_json: bool) -> None:
    """List states, in the order of their streams."""
    with interrupts_kill():
        from ...effects import administration  # noqa: PLC0415 (it imports SQLAlchemy)
    with administration.opened(url) as connection:
        found = administration.states(connection, subscription, origin, limit=limit + 1)
    if len(found) > limit:
        found = found[:limit]
        note(f"these are the first {limit} states, and there are more: --limit NUMBER")
    if as_json:
        print_json([_document(each) for each in found])
        return
    columns = ("origin", "subscription", "stream", "token", "version", "expires_at", "state")
    print_table(columns, [_row(each) for each in found])


@command.command()
@_of_stream
@json_option
def show(*, url: str, origin: str | None, subscription: str, stream: str, as_json: bool) -> None:
    """Print the state of STREAM (namespace/key)."""
    with interrupts_kill():
        from ...effects import administration  # noqa: PLC0415 (it imports SQLAlchemy)
    with administration.opened(url) as connection:
        found = administration.state(connection, subscription, StreamId.parse(stream), origin)
    if as_json:
        print_json(_document(found))
    else:
        click.echo(found.value)


@command.command("set")
@_of_stream
@click.argument("value")
@click.option("--bytes", "as_bytes", is_flag=True, help="VALUE is text that is stored as UTF-8, instead of JSON.")
@click.option(
    "--version",
    type=click.IntRange(1, MAX_STATE_VERSION),
    help="Version of the state. Default: that of the former state.",
)
@click.option(
    "--max-bytes",
    type=click.IntRange(min=1),
    help="The limit of the handler: StreamState(max_bytes=...).  [default: 65536]",
)
@json_option
def set_(
    *,
    url: str,
    origin: str | None,
    subscription: str,
    stream: str,
    value: str,
    as_bytes: bool,
    version: int | None,
    max_bytes: int | None,
    as_json: bool,
) -> None:
    """Set the state of STREAM to VALUE, which is JSON. Handlers see it with their next event.

    The new state keeps the expiry time of the one that it replaces. If that one has expired, it has none.
    """
    with interrupts_kill():
        from ...effects import administration  # noqa: PLC0415 (it imports SQLAlchemy)
        from ...effects.state import MAX_STATE_BYTES  # noqa: PLC0415
    encoded = value.encode()
    if not as_bytes:
        try:
            encoded = msgspec.json.encode(msgspec.json.decode(encoded))
        except msgspec.DecodeError as error:
            raise InvalidArgument(f"VALUE is not JSON: {error}; give --bytes to store it as it is") from None
        except RecursionError:
            raise InvalidArgument("VALUE is nested too deeply for JSON: give --bytes to store it as it is") from None
    with administration.opened(url) as connection:
        parsed = StreamId.parse(stream)
        known = administration.set_state(
            connection,
            subscription,
            parsed,
            encoded,
            version=version,
            origin=origin,
            max_bytes=max_bytes or MAX_STATE_BYTES,
        )
    if as_json:
        print_json({"set": stream})
    else:
        note(f"set: state of {stream}")
    if not known:
        note(
            f"no event of stream {stream} was applied yet: check its name; the handler finds the state with the first "
            "event"
        )


@command.command()
@_of_stream
@json_option
def delete(*, url: str, origin: str | None, subscription: str, stream: str, as_json: bool) -> None:
    """Delete the state of STREAM. Its position stays, so no effect is applied again."""
    with interrupts_kill():
        from ...effects import administration  # noqa: PLC0415 (it imports SQLAlchemy)
    with administration.opened(url) as connection:
        administration.set_state(connection, subscription, StreamId.parse(stream), None, origin=origin)
    if as_json:
        print_json({"deleted": stream})
    else:
        note(f"deleted: state of {stream}")


def _document(found: StoredState) -> dict[str, Any]:
    """The state as JSON if it is JSON, else in base64."""
    document: dict[str, Any] = {**found._asdict(), "token": str(found.token)}
    del document["value"]
    try:
        return {**document, "state": msgspec.json.decode(found.value)}
    except (msgspec.DecodeError, RecursionError):  # the second one for JSON that is nested too deeply
        return {**document, "state_base64": base64.b64encode(found.value).decode()}


def _row(found: StoredState) -> list[object]:
    expires = found.expires_at_us
    text = found.value.decode(errors="replace")
    moment = None if expires is None else datetime.fromtimestamp(expires / 1e6, UTC).isoformat(timespec="seconds")
    shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    return [found.origin, found.subscription, found.stream, str(found.token), found.version, moment, shown]
