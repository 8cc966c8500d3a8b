"""The programs in docs/redis.md, run as they stand, except for the addresses."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis

from benchmarks.servers import RedisServer, free_port
from headrace.adapters.redis import RedisOptions
from headrace.adapters.registry import read_options
from tests.cli.commandline import ENVIRONMENT, SCRIPT

GUIDE = Path(__file__).parents[3] / "docs" / "redis.md"


@pytest.fixture
def guide(redis_server: RedisServer) -> str:
    with Redis(port=redis_server.port, db=7) as client:
        cast("Any", client).flushdb()  # the programs use one prefix
    text = GUIDE.read_text().replace("localhost:6379", f"{redis_server.address}/7")
    return text.replace("9465", str(free_port()))


def block(guide: str, language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", guide, re.DOTALL)[number]


def run(command: list[str], directory: Path) -> str:
    environment = ENVIRONMENT | {"PATH": f"{Path(SCRIPT).parent}:{ENVIRONMENT['PATH']}"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_program_with_a_provider_gets_due_events(guide: str, tmp_path: Path) -> None:
    printed = run([sys.executable, "-c", block(guide, "python")], tmp_path)
    assert printed == "orders/42 b'now'\norders/42 b'soon'\n"


def test_the_program_with_a_queue_empties_it(guide: str, tmp_path: Path) -> None:
    lines = run([sys.executable, "-c", block(guide, "python", 2)], tmp_path).splitlines()
    assert lines[0] == "bill-7 b'bill' 9 1"
    assert [line.split()[1] for line in (lines[1], lines[3])] == ["b'news'", "b'welcome'"]
    assert lines[-1] == "1 done; ShardSize(ready=0, delayed=0, claimed=0, held=0)"


@pytest.mark.long
def test_others_publish_by_way_of_the_silo(guide: str, tmp_path: Path) -> None:
    (tmp_path / "silo.toml").write_text(block(guide, "toml"))
    silo = subprocess.Popen([SCRIPT, "silo", "silo.toml"], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE)
    with silo:
        try:
            assert silo.stderr is not None
            assert any(b"silo is ready" in line for line in silo.stderr)
            run(["bash", "-c", block(guide, "console").removeprefix("$ ")], tmp_path)
            run([sys.executable, "-c", block(guide, "python", 1)], tmp_path)
        finally:
            silo.terminate()
            silo.communicate(timeout=30)
    assert silo.returncode == 0


def test_the_options_of_several_servers_are_options(guide: str) -> None:
    found = re.search(r"^    (options = \{ zone.*?\] \})$", guide, re.DOTALL | re.MULTILINE)
    assert found
    given = tomllib.loads(" ".join(found[1].split()))["options"]
    assert [shard.name for shard in read_options("redis", RedisOptions, given).servers()] == ["a", "b"]
