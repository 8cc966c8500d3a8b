"""The control store remembers where a provider's queues are, without secrets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis

from headrace import InvalidArgument
from headrace.adapters.redis import RedisOptions, ShardOptions
from headrace.adapters.redis.location import location_of, with_location
from headrace.adapters.redis.login import PASSWORD, USER, with_login
from headrace.store.control_store import ControlStore
from tests.cli.commandline import Headrace
from tests.cli.conftest import headrace

__all__ = ("headrace",)

SECRET = "s3cr/et"
LOGIN = "u:s3cr%2Fet"
DATA = ("--data", "d")


@pytest.fixture
def login(direct: Redis) -> Iterator[str]:
    """The login that the server asks for, as urls have it."""
    admin = cast("Any", direct)
    admin.acl_setuser("u", enabled=True, passwords=[f"+{SECRET}"], keys=["*"], channels=["*"], categories=["+@all"])
    admin.acl_setuser("default", enabled=False)
    try:
        yield f"{LOGIN}@"
    finally:
        admin.acl_setuser("default", enabled=True)
        admin.acl_deluser("u")


def make(headrace: Headrace, *options: str) -> None:
    given = [word for option in options for word in ("--option", option)]
    made = headrace("subscriptions", "create", *DATA, "--adapter", "redis", *given, "s", "orders/*")
    assert made.code == 0, made


@pytest.mark.long
def test_commands_reach_the_queues_without_options_once_the_provider_is_made(headrace: Headrace, url: str) -> None:
    make(headrace, f"url={url}", "prefix=shop")
    assert headrace("publish", *DATA, "--stream", "orders/1", "--format", "raw", stdin=b"paid\n").code == 0
    read = headrace("subscribe", *DATA, "--name", "s", "--no-follow", "--format", "raw", "orders/*")
    assert (read.code, read.out) == (0, "paid\n")
    assert headrace("queues", *DATA).code == 0
    (listed,) = headrace("subscriptions", "list", *DATA, "--json").json
    assert listed["name"] == "s"


@pytest.mark.long
def test_another_url_is_stored_and_another_prefix_is_refused(headrace: Headrace, url: str) -> None:
    make(headrace, f"url={url}", "prefix=shop")
    away = headrace("queues", *DATA, "--option", "url=redis://127.0.0.1:1")
    assert "Redis at 127.0.0.1:1 does not serve" in away.refused(1)
    assert headrace("queues", *DATA).code == 0  # what cannot be opened is not stored
    moved = url.replace("127.0.0.1", "localhost")
    assert headrace("queues", *DATA, "--option", f"url={moved}").code == 0
    refused = headrace("queues", *DATA, "--option", "prefix=other").refused(2)
    assert refused == (
        "provider 'default' has its queues in Redis under the prefix 'shop', not 'other': open it with 'shop', or "
        "create another provider"
    )


@pytest.mark.long
async def test_the_url_of_the_last_opening_is_stored(headrace: Headrace, url: str, tmp_path: Path) -> None:
    make(headrace, f"url={url}")
    moved = url.replace("127.0.0.1", "localhost")
    for given, expected in ((), url), (("--option", f"url={moved}"), moved), ((), moved):
        assert headrace("queues", *DATA, *given).code == 0
        store = await ControlStore.open(tmp_path / "d" / "control.db")
        (provider,) = await store.providers()
        await store.aclose()
        assert provider.options == {"url": expected, "cluster": False, "prefix": "headrace"}


@pytest.mark.long
def test_user_and_password_are_not_stored_and_come_from_variables(
    headrace: Headrace, url: str, login: str, tmp_path: Path
) -> None:
    make(headrace, f"url={url.replace('//', f'//{login}')}")
    for path in (path for path in (tmp_path / "d").rglob("*") if path.is_file()):
        assert b"s3cr" not in path.read_bytes()
        assert LOGIN.encode() not in path.read_bytes()
    refused = headrace("queues", *DATA).refused(1)
    address = url.removeprefix("redis://")
    assert refused == (
        f"Redis at {address} refuses the login (Authentication required): give user and password in its url, or in "
        f"the environment variables {USER} and {PASSWORD}"
    )
    assert headrace("queues", *DATA, HEADRACE_REDIS_USER="u", HEADRACE_REDIS_PASSWORD=SECRET).code == 0


@pytest.mark.parametrize(
    ("url", "stored"),
    [
        ("redis://h", "redis://h"),
        ("rediss://u:p%40@[::1]:1/3?ssl_ca_certs=a.pem&ssl_password=x", "rediss://[::1]:1/3?ssl_ca_certs=a.pem"),
        ("unix:///run/redis.sock?username=u&password=x&db=2", "unix:///run/redis.sock?db=2"),
    ],
)
def test_the_stored_url_has_no_secret(url: str, stored: str) -> None:
    assert location_of(RedisOptions(url=url))["url"] == stored


def test_several_servers_are_stored_without_their_passwords() -> None:
    a = ShardOptions(name="a", url="redis://:x@a", zone="z")
    b = ShardOptions(name="b", url="redis://b", cluster=True)
    assert location_of(RedisOptions(shards=(a, b))) == {
        "shards": [
            {"name": "a", "url": "redis://a", "zone": "z", "cluster": False},
            {"name": "b", "url": "redis://b", "zone": "", "cluster": True},
        ],
        "prefix": "headrace",
    }


def test_given_options_go_before_stored_ones() -> None:
    stored = {"url": "redis://a", "cluster": True, "prefix": "x"}
    assert with_location("p", {}, stored) == stored
    assert with_location("p", {"zone": "z"}, stored) == {**stored, "zone": "z"}
    assert with_location("p", {"url": "redis://b"}, stored) == {"url": "redis://b", "prefix": "x"}
    assert with_location("p", {"shards": []}, stored) == {"shards": [], "prefix": "x"}
    assert with_location("p", {"prefix": "y"}, {}) == {"prefix": "y"}
    with pytest.raises(InvalidArgument, match="under the prefix 'x', not 'y'"):
        with_location("p", {"prefix": "y"}, stored)


@pytest.mark.parametrize("url", ["redis://:own@h", "redis://u@h", "redis://h?password=own"])
def test_a_login_in_the_url_goes_before_the_variables(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, "other")
    assert with_login(url) == url
    assert with_login("redis://h/1") == "redis://:other@h/1"
