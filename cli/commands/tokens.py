"""`headrace tokens`."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...server.access import REFRESH_S, Permission, new_token
from ...silo.addresses import check_store
from ...store.datadir import MARKER, check_marker_kept, open_data_directory
from ...store.token_record import TokenRecord
from ...streams.errors import HeadraceError, NotFound
from ...streams.remedies import remedy
from .help import CommandGroup
from .options import data_option, store_option, typed
from .output import json_option, note, print_json, print_table
from .running import run

if TYPE_CHECKING:
    from ...store.control_store import ControlStore


@click.group("tokens", cls=CommandGroup)
def command() -> None:
    """Create, list and revoke the tokens of clients.

    Tokens are stored in a data directory, or in the database of a cluster (cluster.store). A running silo knows a
    change within a few seconds, without a restart.
    """


Kept = Path | str
"""The location of the tokens: a data directory, or the URL of a database."""


def _kept_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--data` or `--store`, passed to the command as `kept`."""

    @data_option(required=False, hint="give the URL of cluster.store as --store")
    @store_option("The silos' cluster.store, instead of a data directory.")
    @functools.wraps(command)
    def with_kept(*args: Any, data: Path | None, store: str | None, **options: Any) -> Any:
        return command(*args, kept=_kept(data, store), **options)

    return with_kept


def _kept(data: Path | None, store: str | None) -> Kept:
    """Accept exactly one of the two. An option on the command line overrides a variable."""
    if data is not None and store is not None:
        data, store = (data if typed("data") else None), (store if typed("store") else None)
        if (data is None) == (store is None):
            raise click.UsageError("--data and --store exclude each other: name a data directory or a database")
    if store is not None:
        check_store(store, "--store")
    kept = data if store is None else store
    if kept is None:
        raise click.UsageError("Missing option '--data' or '--store'.")
    return kept


def _permission_option(permission: Permission, text: str) -> Callable[..., Any]:
    flag = f"--{permission.value}"
    return click.option(flag, multiple=True, metavar="NAMESPACES", help=f"{text}; may be repeated.")


@command.command()
@_kept_options
@click.argument("name")
@_permission_option(Permission.PUBLISH, "May publish to these")
@_permission_option(Permission.SUBSCRIBE, "May subscribe to these")
@_permission_option(Permission.MANAGE, "May delete and move subscriptions of these, and manage their dead letters")
@click.option("--client", metavar="NAME", help="Name of the client, such as that of the replaced token. Default: NAME.")
@json_option
def create(*, kept: Kept, name: str, client: str | None, as_json: bool, **permissions: Sequence[str]) -> None:
    """Create a token and print it, once: only its hash is stored. Running silos know it within 2 seconds.

    NAMESPACES is one namespace, such as orders, or a prefix, such as 'orders*'; '*' is all of them. No permission
    includes another. `--manage '*'` also allows operations on the whole cluster.

    If a token replaces another, give both the same --client: the client keeps the ids of its idempotent producers.
    """
    granted = {permission: tuple(permissions[permission.value]) for permission in Permission}
    text, record = run(_create(kept, name, granted, client))
    try:
        if as_json:
            print_json({"token": text, **_document(record)})
        else:
            click.echo(text)
    except OSError:
        _revoke_unseen(kept, name)
        raise
    if not as_json:
        note(f"token {name!r} is shown only now; running silos know it within {REFRESH_S:g} s")


@command.command("list")
@_kept_options
@json_option
def list_(*, kept: Kept, as_json: bool) -> None:
    """List the tokens by name, with the permissions of each."""
    records = run(_list(kept))
    if as_json:
        print_json([_document(record) for record in records])
        return
    columns = ("name", "client", *(permission.value for permission in Permission), "created_at")
    print_table(columns, [_row(record) for record in records])


@command.command()
@_kept_options
@click.argument("name")
@json_option
def revoke(*, kept: Kept, name: str, as_json: bool) -> None:
    """Revoke the token NAME. Within a few seconds running silos refuse it, and end the calls opened with it."""
    run(_revoke(kept, name))
    if as_json:
        print_json({"revoked": name})
    else:
        note(f"revoked: token {name!r}")


def _document(record: TokenRecord) -> dict[str, Any]:
    permissions = {permission.value: record.permissions.get(permission.value, ()) for permission in Permission}
    created_at = _created_at(record).isoformat()
    return {"name": record.name, "client": record.client, **permissions, "created_at": created_at}


def _row(record: TokenRecord) -> list[object]:
    permissions = [" ".join(record.permissions.get(permission.value, ())) for permission in Permission]
    return [record.name, record.client, *permissions, _created_at(record).isoformat(timespec="seconds")]


def _created_at(record: TokenRecord) -> datetime:
    return datetime.fromtimestamp(record.created_at_us / 1_000_000, UTC)


async def _create(
    kept: Kept, name: str, permissions: Mapping[Permission, Sequence[str]], client: str | None
) -> tuple[str, TokenRecord]:
    token = new_token(name, permissions, time.time_ns() // 1000, client)
    async with _opened(kept, create=True) as store:
        await store.add_token(token.record)
    return token


def _revoke_unseen(kept: Kept, name: str) -> None:
    """Revoke a token that could not be shown, so that its name becomes free again."""
    try:
        run(_revoke(kept, name))
        text = f"token {name!r} is revoked, because it could not be shown"
    except (HeadraceError, OSError):
        revoke = remedy("tokens revoke", name)
        text = f"token {name!r} could not be shown or revoked: run {revoke} with the same --data or --store"
    with suppress(OSError):  # stderr cannot be written either
        note(text)


async def _list(kept: Kept) -> list[TokenRecord]:
    async with _opened(kept) as store:
        return await store.tokens()


async def _revoke(kept: Kept, name: str) -> None:
    async with _opened(kept) as store:
        await store.delete_token(name)


@asynccontextmanager
async def _opened(kept: Kept, *, create: bool = False) -> AsyncGenerator[ControlStore]:
    """Open the control store of the place. A data directory has to exist unless `create`."""
    database = _control_db(kept, create) if isinstance(kept, Path) else kept
    from ...store.control_store import ControlStore  # noqa: PLC0415 (it imports SQLAlchemy)

    store = await ControlStore.open(database)
    try:
        yield store
    finally:
        await store.aclose()


def _control_db(data: Path, create: bool) -> Path:
    exists = (data / MARKER).exists()
    check_marker_kept(data)
    if not exists and not create:
        raise NotFound(f"{str(data)!r} is no data directory: check its name, or create a token in it first")
    directory = open_data_directory(data)
    if not create and not directory.has_control_db():  # opening it would make it
        raise NotFound(f"data directory {str(data)!r} has no control.db: check its name, or create a token in it first")
    if not exists:
        note(f"created data directory {str(data)!r}")
    return directory.control_db
