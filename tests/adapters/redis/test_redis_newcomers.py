"""Mistakes of a user's first hour, and the line that names each of them."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.servers import RedisServer, free_port
from headrace import Closed, InvalidArgument, Provider, StorageError
from headrace.adapters.redis import RedisOptions, RedisQueue, ShardOptions
from tests.cli.commandline import ENVIRONMENT, Ran
from tests.cli.forking import forking


def headrace(*arguments: str, cwd: Path) -> Ran:
    code, out, err = forking().run(arguments, b"", cwd, ENVIRONMENT, 60)
    return Ran(code, out.decode(), err.decode())


# ---- options ---------------------------------------------------------------------------------------------------------


async def test_a_server_that_is_no_cluster_is_no_cluster(redis_server: RedisServer, tmp_path: Path) -> None:
    url = f"redis://{redis_server.address}"
    async with RedisQueue.open("q", RedisOptions(url=url, cluster=True)) as queue:
        with pytest.raises(InvalidArgument, match=r"127\.0\.0\.1:\d+ is no Redis Cluster: leave `cluster = true` out"):
            await queue.push(b"x")
    with pytest.raises(InvalidArgument, match="is no Redis Cluster"):
        async with Provider.open(tmp_path / "d", adapter="redis", options={"url": url, "cluster": True}):
            ...


async def test_a_cluster_of_which_no_node_answers_is_away(tmp_path: Path) -> None:
    options = {"url": f"redis://127.0.0.1:{free_port()}", "cluster": True}
    with pytest.raises(StorageError, match="does not serve"):
        async with Provider.open(tmp_path / "d", adapter="redis", options=options):
            ...


def test_two_shards_are_not_one_server() -> None:
    shards = tuple(ShardOptions(name=name, url="redis://:secret@here:6379") for name in "ab")
    with pytest.raises(InvalidArgument, match=r"two of the shards a, b have one url$"):
        RedisOptions(shards=shards).servers()


def test_a_zone_that_no_shard_has_is_said(caplog: pytest.LogCaptureFixture) -> None:
    shards = tuple(ShardOptions(name=name, url=f"redis://{name}:6379", zone=name) for name in "ab")
    with caplog.at_level(logging.WARNING):
        RedisOptions(shards=shards, zone="b").servers()
        assert not caplog.messages
        RedisOptions(shards=shards, zone="c").servers()
    assert "no shard is in zone 'c'" in caplog.text


# ---- RedisQueue ------------------------------------------------------------------------------------------------------


async def test_a_claim_may_be_ended_by_another_object_of_the_queue(options: RedisOptions, queue: RedisQueue) -> None:
    for body in (b"1", b"2", b"3"):
        await queue.push(body)
    one, two, three = await queue.pop(3)
    async with RedisQueue.open("q", options) as other:
        assert await other.acknowledge(one) == 1
        assert await other.extend(two, 60)
        assert await other.release(two)
    assert [taken.id for taken in await queue.pop(3)] == [two.id]
    assert await queue.acknowledge(three) == 1


async def test_a_claim_of_another_queue_is_refused(options: RedisOptions, queue: RedisQueue) -> None:
    await queue.push(b"1")
    (taken,) = await queue.pop(1)
    async with RedisQueue.open("other", options) as other:
        for end in (other.acknowledge(taken), other.release(taken), other.extend(taken, 60)):
            with pytest.raises(InvalidArgument, match="was taken from another queue"):
                await end
    assert await queue.acknowledge(taken) == 1


async def test_invalid_event_is_not_stored(queue: RedisQueue) -> None:
    push = cast("Any", queue.push)
    for wrong, why in (
        (push("text"), "bytes, not str: encode it"),
        (push(b"x", delay_s=timedelta(seconds=1)), r"number of seconds, .*timedelta\(seconds=1\)"),
        (push(b"x", id=7), "an id is a text, not 7"),
        (push(b"x", priority=100), "whole number from 0 to 99"),
        (queue.ensure(b"x", id=""), "give one that is not empty"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            await wrong
    assert (await queue.size()).waiting == 0


async def test_a_queue_that_is_closed_stores_nothing(options: RedisOptions) -> None:
    async with RedisQueue.open("q", options) as queue:
        await queue.push(b"1")
    for late in (queue.push(b"2"), queue.pop(1), queue.size()):
        with pytest.raises(Closed, match="is closed"):
            await late
    async with RedisQueue.open("q", options) as again:
        assert (await again.size()).waiting == 1


def test_a_signature_does_not_print_the_scripts() -> None:
    assert len(str(inspect.signature(RedisQueue.open))) < 300


# ---- without the extra, and on the command line ----------------------------------------------------------------------


def test_without_the_package_the_error_names_the_extra_to_install() -> None:
    program = "import sys; sys.modules['redis'] = None; import headrace.adapters.redis"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1].endswith("which is not installed: pip install 'headrace[redis]'")


@pytest.mark.long
def test_commands_on_a_data_directory_take_the_adapters_options(options: RedisOptions, tmp_path: Path) -> None:
    of_redis = ("--option", f"url={options.url}", "--option", f"prefix={options.prefix}")
    (tmp_path / "lines").write_text("1\n2\n")
    published = headrace(
        "publish", "--data", "d", "--adapter", "redis", *of_redis, "--stream", "a/b", "lines", cwd=tmp_path
    )
    assert published.code == 0, published
    created = headrace("subscriptions", "create", "--data", "d", *of_redis, "s", "a/*", cwd=tmp_path)
    assert created.code == 0, created
    queues = headrace("queues", "--data", "d", *of_redis, "--json", cwd=tmp_path).json
    assert [queue["queue"] for queue in queues] == list(range(8))
    assert [
        one["name"] for one in headrace("subscriptions", "list", "--data", "d", *of_redis, "--json", cwd=tmp_path).json
    ] == ["s"]
    assert headrace("deadletters", "list", "--data", "d", *of_redis, "--json", cwd=tmp_path).json == []
    assert "without taking from them" in headrace("streams", "--data", "d", *of_redis, cwd=tmp_path).refused(2)


def test_commands_without_the_options_say_how_they_are_given(options: RedisOptions, tmp_path: Path) -> None:
    of_redis = ("--option", f"url={options.url}", "--option", f"prefix={options.prefix}")
    new = ("subscriptions", "create", "--data", "d", "--adapter", "redis", "s", "a/*")
    refused = headrace(*new, cwd=tmp_path).refused(2)
    assert refused.startswith("--option NAME=VALUE: adapter 'redis': give either url, as redis://localhost:6379,")
    assert refused.endswith("; or ask a silo: --server")
    silo = headrace("queues", "--server", "127.0.0.1:1", *of_redis, cwd=tmp_path).refused(2)
    assert silo.startswith("--option is for --data")
