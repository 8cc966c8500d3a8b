"""`headrace tokens`."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ...streams.errors import NotFound
from ...streams.store import ControlStore, TokenRecord
from ..access import REFRESH_S, Permission, new_token
from ..config import check_store
from ..datadir import MARKER, open_data_directory
from .options import DataPath, typed
from .output import json_option, note, print_json, print_table
from .running import run


@click.group("tokens")
def command() -> None:
    """Create, list and revoke the tokens with which clients come.

    They are kept in a data directory, or in the database that a cluster names as cluster.store. A silo that runs on it
    notices within a few seconds, without a restart.
    """


Kept = Path | str
"""A data directory, or the URL of a database: where tokens are kept."""


def _kept_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--data` or `--store`, handed to the command as `kept`."""

    @click.option(
        "--data", type=DataPath("give the URL of cluster.store as --store"), envvar="HEADRACE_DATA", show_envvar=True,
        metavar="DIR", help="Data directory.",
    )  # fmt: skip
    @click.option(
        "--store", envvar="HEADRACE_CLUSTER__STORE", show_envvar=True, metavar="URL",
        help="Instead, cluster.store of the silos. One with a password: better by the variable.",
    )  # fmt: skip
    @functools.wraps(command)
    def with_kept(*args: Any, data: Path | None, store: str | None, **options: Any) -> Any:
        return command(*args, kept=_kept(data, store), **options)

    return with_kept


def _kept(data: Path | None, store: str | None) -> Kept:
    """Exactly one of the two; one on the command line goes before one in a variable."""
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


def _permission_option(permission: Permission, what: str) -> Callable[..., Any]:
    flag = f"--{permission.value}"
    return click.option(flag, multiple=True, metavar="NAMESPACES", help=f"{what}; may be repeated.")


@command.command()
@_kept_options
@click.argument("name")
@_permission_option(Permission.PUBLISH, "May publish to these")
@_permission_option(Permission.SUBSCRIBE, "May subscribe to these")
@_permission_option(Permission.MANAGE, "May delete and move subscriptions of these, and handle their dead letters")
@json_option
def create(*, kept: Kept, name: str, as_json: bool, **permissions: Sequence[str]) -> None:
    """Make a token, and print it: this once, for only its hash is kept. Running silos know it within 2 seconds.

    NAMESPACES is one namespace, such as orders, or how some begin, such as 'orders*'; '*' is all of them. No permission
    includes another. `--manage '*'` also allows what concerns the whole silo.
    """
    granted = {permission: tuple(permissions[permission.value]) for permission in Permission}
    text, record = run(_create(kept, name, granted))
    if as_json:
        print_json({"token": text, **_document(record)})
    else:
        click.echo(text)
        note(f"token {name} is shown this once; silos that run know it within {REFRESH_S:g} s")


@command.command("list")
@_kept_options
@json_option
def list_(*, kept: Kept, as_json: bool) -> None:
    """The tokens by name, and what each allows."""
    records = run(_list(kept))
    if as_json:
        print_json([_document(record) for record in records])
        return
    columns = ("name", *(permission.value for permission in Permission), "created_at")
    print_table(columns, [_row(record) for record in records])


@command.command()
@_kept_options
@click.argument("name")
@json_option
def revoke(*, kept: Kept, name: str, as_json: bool) -> None:
    """Revoke the token NAME. A running silo refuses it within a few seconds, and ends the streams opened with it."""
    run(_revoke(kept, name))
    if as_json:
        print_json({"revoked": name})
    else:
        note(f"revoked: token {name}")


def _document(record: TokenRecord) -> dict[str, Any]:
    permissions = {permission.value: record.permissions.get(permission.value, ()) for permission in Permission}
    return {"name": record.name, **permissions, "created_at": _created_at(record).isoformat()}


def _row(record: TokenRecord) -> list[object]:
    permissions = [" ".join(record.permissions.get(permission.value, ())) for permission in Permission]
    return [record.name, *permissions, _created_at(record).isoformat(timespec="seconds")]


def _created_at(record: TokenRecord) -> datetime:
    return datetime.fromtimestamp(record.created_at_us / 1_000_000, UTC)


async def _create(kept: Kept, name: str, permissions: Mapping[Permission, Sequence[str]]) -> tuple[str, TokenRecord]:
    token = new_token(name, permissions, time.time_ns() // 1000)
    async with _opened(kept, create=True) as store:
        await store.add_token(token.record)
    return token


async def _list(kept: Kept) -> list[TokenRecord]:
    async with _opened(kept) as store:
        return await store.tokens()


async def _revoke(kept: Kept, name: str) -> None:
    async with _opened(kept) as store:
        await store.delete_token(name)


@asynccontextmanager
async def _opened(kept: Kept, *, create: bool = False) -> AsyncGenerator[ControlStore]:
    """The control store there. A data directory has to exist unless `create`."""
    store = await ControlStore.open(_control_db(kept, create) if isinstance(kept, Path) else kept)
    try:
        yield store
    finally:
        await store.aclose()


def _control_db(data: Path, create: bool) -> Path:
    exists = (data / MARKER).exists()
    if not exists and not create:
        raise NotFound(f"{data} is no data directory: check its name, or create a token in it first")
    directory = open_data_directory(data)
    if not exists:
        note(f"created data directory {data}")
    return directory.control_db
