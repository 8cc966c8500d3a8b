"""`headrace postgres`, and other commands on queues in PostgreSQL."""

from pathlib import Path

import psycopg
import pytest

from tests.cli.commandline import Headrace


@pytest.mark.long
def test_migrate_creates_the_tables_once(headrace: Headrace, postgres_url: str):
    missing = headrace("postgres", "list", postgres_url)
    assert (missing.code, missing.err.count("\n")) == (2, 1)
    assert "headrace postgres migrate URL" in missing.err
    assert headrace("postgres", "migrate", postgres_url, "--json").json == {"version": 1, "changed": True}
    assert "already" in headrace("postgres", "migrate", postgres_url).err
    assert headrace("postgres", "list", postgres_url, "--json").json == []


@pytest.mark.long
def test_the_printed_statements_create_the_same_tables(headrace: Headrace, postgres_url: str):
    with psycopg.connect(postgres_url) as connection:
        connection.execute(headrace("postgres", "ddl").out.encode())
    assert headrace("postgres", "migrate", postgres_url, "--json").json == {"version": 1, "changed": False}


@pytest.mark.long
def test_commands_work_on_queues_in_postgres(headrace: Headrace, postgres_url: str, tmp_path: Path):
    (tmp_path / "lines").write_text("a\nb\n")
    place = ("--data", "d", "--adapter", "postgres", "--queues", "2", "--option", f"url={postgres_url}")
    lines = ("lines", "--stream", "orders/1", "--format", "raw")
    refused = headrace("publish", *lines, *place)
    assert (refused.code, "headrace postgres migrate URL" in refused.err) == (2, True)
    published = headrace("publish", *lines, *place, "--option", "create=true")
    assert published.code == 0, published.err
    queues = headrace("queues", "--data", "d", "--option", f"url={postgres_url}", "--json").json
    assert sum(queue["events"] for queue in queues) == 2
    (listed,) = headrace("postgres", "list", postgres_url, "--json").json
    assert (listed["provider"], listed["queues"], listed["segments"], listed["events"]) == ("default", 2, 1, 2)
    checked = headrace("check", "--data", "d")
    assert checked.code == 0, checked.err
    assert "not checked: provider 'default'" in checked.err


def test_a_server_that_is_away_is_one_line_without_the_password(headrace: Headrace):
    away = headrace("postgres", "migrate", "postgresql://me:secret@127.0.0.1:1/db")
    assert (away.code, away.err.count("\n"), "secret" in away.err) == (1, 1, False)
