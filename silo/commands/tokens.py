"""`headrace tokens`."""

from __future__ import annotations

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
from ..datadir import MARKER, open_data_directory
from .output import json_option, note, print_json, print_table
from .running import run


@click.group("tokens")
def command() -> None:
    """Create, list and revoke the tokens with which clients come.

    They are kept in a data directory. A silo that runs on it notices within a few seconds, without a restart.
    """


def _data_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--data", required=True, type=click.Path(path_type=Path), envvar="HEADRACE_DATA", show_envvar=True,
        metavar="DIR", help="Data directory.",
    )(function)  # fmt: skip


def _permission_option(permission: Permission, what: str) -> Callable[..., Any]:
    flag = f"--{permission.value}"
    return click.option(flag, multiple=True, metavar="NAMESPACES", help=f"{what}; may be repeated.")


@command.command()
@_data_option
@click.argument("name")
@_permission_option(Permission.PUBLISH, "May publish to these")
@_permission_option(Permission.SUBSCRIBE, "May subscribe to these")
@_permission_option(Permission.MANAGE, "May delete and move subscriptions of these, and handle their dead letters")
@json_option
def create(*, data: Path, name: str, as_json: bool, **permissions: Sequence[str]) -> None:
    """Make a token, and print it: this once, for only its hash is kept. Running silos know it within 2 seconds.

    NAMESPACES is one namespace, such as orders, or how some begin, such as 'orders*'; '*' is all of them. No permission
    includes another. `--manage '*'` also allows what concerns the whole silo.
    """
    granted = {permission: tuple(permissions[permission.value]) for permission in Permission}
    text, record = run(_create(data, name, granted))
    if as_json:
        print_json({"token": text, **_document(record)})
    else:
        click.echo(text)
        note(f"token {name} is shown this once; silos that run know it within {REFRESH_S:g} s")


@command.command("list")
@_data_option
@json_option
def list_(*, data: Path, as_json: bool) -> None:
    """The tokens by name, and what each allows."""
    records = run(_list(data))
    if as_json:
        print_json([_document(record) for record in records])
        return
    columns = ("name", *(permission.value for permission in Permission), "created_at")
    print_table(columns, [_row(record) for record in records])


@command.command()
@_data_option
@click.argument("name")
@json_option
def revoke(*, data: Path, name: str, as_json: bool) -> None:
    """Revoke the token NAME. A running silo refuses it within a few seconds, and ends the streams opened with it."""
    run(_revoke(data, name))
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


async def _create(data: Path, name: str, permissions: Mapping[Permission, Sequence[str]]) -> tuple[str, TokenRecord]:
    token = new_token(name, permissions, time.time_ns() // 1000)
    async with _opened(data, create=True) as store:
        await store.add_token(token.record)
    return token


async def _list(data: Path) -> list[TokenRecord]:
    async with _opened(data) as store:
        return await store.tokens()


async def _revoke(data: Path, name: str) -> None:
    async with _opened(data) as store:
        await store.delete_token(name)


@asynccontextmanager
async def _opened(data: Path, *, create: bool = False) -> AsyncGenerator[ControlStore]:
    """The control store of a data directory, which has to exist unless `create`."""
    exists = (data / MARKER).exists()
    if not exists and not create:
        raise NotFound(f"{data} is no data directory: check its name, or create a token in it first")
    directory = open_data_directory(data)
    if not exists:
        note(f"created data directory {data}")
    store = await ControlStore.open(directory.control_db)
    try:
        yield store
    finally:
        await store.aclose()
