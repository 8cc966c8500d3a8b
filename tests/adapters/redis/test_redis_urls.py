"""What urls and names may be, and that no message shows a password."""

from __future__ import annotations

import pytest

from headrace import InvalidArgument, StorageError
from headrace.adapters import AdapterContext
from headrace.adapters.redis import RedisOptions, RedisQueue, open_adapter
from headrace.adapters.redis.server import RedisConnection, address_of

WRONG = [
    ("redis://:secr/et@127.0.0.1:1", "written %2F"),
    ("redis://u:secr#et@127.0.0.1:1", "written %2F"),
    ("redis://:secr?et@127.0.0.1:1", "written %2F"),
    ("redis://:sec@secr/et@127.0.0.1:1", "written %2F"),
    ("redis://:secret@127.0.0.1:port", "its port cannot be read"),
    ("redis://:secret", "its port cannot be read"),
    ("redis://:secret@[::1:1", "its host or its port"),
    ("redis://:secret@127.0.0.1:1/abc", "the number of a database"),
    ("redis://:secret@127.0.0.1:1/1/2", "the number of a database"),
    ("redis://:secret@127.0.0.1:1?db=secret", "the part after the ?"),
    ("http://:secret@127.0.0.1:1", "begins with redis://"),
    ("secret", "begins with redis://"),
]


@pytest.mark.parametrize(("url", "why"), WRONG)
def test_a_wrong_url_is_refused_without_showing_a_part_of_it(url: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match="the url of a Redis is") as raised:
        RedisConnection(url)
    assert why in str(raised.value)
    assert "secr" not in str(raised.value)


def test_a_cluster_has_no_numbered_databases() -> None:
    address_of("redis://h:1/0", cluster=True)
    with pytest.raises(InvalidArgument, match="no database but 0"):
        address_of("redis://h:1/1", cluster=True)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", "h"),
        ("rediss://u:p%2F%23%3F%40@h:1/3", "h:1"),
        ("redis://:a:b@[::1]:1/", "[::1]:1"),
        ("unix:///run/redis.sock?password=x", "/run/redis.sock"),
    ],
)
def test_an_address_is_shown_without_user_and_password(url: str, address: str) -> None:
    assert RedisConnection(url).address == address


async def test_a_server_that_is_away_is_named_without_its_password() -> None:
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1 does not serve") as raised:
        await open_adapter(AdapterContext(provider="p", queues=1), {"url": "redis://:secret@127.0.0.1:1"})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("prefix", ["", "a b", "a:b", "a}b", "{a"])
async def test_a_prefix_that_is_no_name_is_refused(prefix: str) -> None:
    options = {"url": "redis://127.0.0.1:1", "prefix": prefix}
    with pytest.raises(InvalidArgument, match=r"prefix .* is no name"):
        await open_adapter(AdapterContext(provider="p", queues=1), options)


@pytest.mark.parametrize("name", ["default.0", "a.b.17"])
async def test_a_queue_name_that_a_provider_may_use_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="would be one of a provider"):
        async with RedisQueue.open(name, RedisOptions(url="redis://127.0.0.1:1")):
            pass


@pytest.mark.parametrize("name", ["mails", "mails.eu", "v2", "2", "mails.v2"])
async def test_other_names_of_queues_are_none_of_providers(name: str) -> None:
    async with RedisQueue.open(name, RedisOptions(url="redis://127.0.0.1:1")) as queue:
        assert queue.shards[0].keys.meta == f"{{headrace:{name}:0}}meta"
