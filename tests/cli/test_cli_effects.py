"""`headrace effects` and `headrace state`."""

import base64
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tests.cli.commandline import Headrace, Start, ended

ROW = "INSERT INTO headrace_position VALUES ('here', 'billing', 'orders/42', 1, 0, 7, 0, 0, 1, 1, {}, 1, NULL)"


@pytest.mark.long
def test_migrate_creates_the_tables_once(headrace: Headrace, postgres_url: str):
    for url in ("sqlite:///user.db", postgres_url):
        assert headrace("effects", "migrate", url, "--json").json == {"version": 3, "changed": True}
        assert "already" in headrace("effects", "migrate", url).err
        assert headrace("effects", "list", url, "--json").json == []


@pytest.mark.long
def test_a_database_in_memory_is_refused(headrace: Headrace):
    for url in ("sqlite://", "sqlite:///:memory:", "sqlite+aiosqlite://", "sqlite:///file:a?mode=memory&uri=true"):
        for command in ("migrate", "list"):
            refused = headrace("effects", command, url).refused(2)
            assert refused.startswith("effects in SQLite need a file: a database in memory ends with its connection")
    assert headrace("effects", "migrate", "sqlite:///a:memory:b.db").code == 0


@pytest.mark.long
def test_the_printed_statements_create_the_same_tables(headrace: Headrace, tmp_path: Path, postgres_url: str):
    with closing(sqlite3.connect(tmp_path / "user.db")) as connection:
        connection.executescript(headrace("effects", "ddl", "--dialect", "sqlite").out)
    with psycopg.connect(postgres_url) as connection:
        connection.execute(headrace("effects", "ddl").out.encode())
    for url in ("sqlite:///user.db", postgres_url):
        assert headrace("effects", "migrate", url, "--json").json == {"version": 3, "changed": False}
    with psycopg.connect(postgres_url) as connection:
        options = connection.execute("SELECT reloptions FROM pg_class WHERE relname = 'headrace_position'").fetchall()
        assert ["fillfactor=70"] in [row[0] for row in options]


@pytest.mark.long
def test_missing_tables_wrong_urls_and_newer_tables_are_one_line(headrace: Headrace, tmp_path: Path):
    (tmp_path / "user.db").touch()
    missing = headrace("effects", "list", "sqlite:///user.db")
    assert (missing.code, missing.err.count("\n")) == (1, 1)
    assert "create them with 'headrace effects migrate sqlite:///user.db'" in missing.err
    wrong = headrace("effects", "migrate", "no url with a secret")
    assert (wrong.code, "secret" in wrong.err) == (2, False)
    assert headrace("effects", "migrate", "mysql://host/db").code == 2
    refused = headrace("effects", "migrate", "postgresql://me:secret@127.0.0.1:1/db")
    assert (refused.code, "secret" in refused.err) == (1, False)
    headrace("effects", "migrate", "sqlite:///user.db")
    with closing(sqlite3.connect(tmp_path / "user.db")) as connection, connection:
        connection.execute("UPDATE headrace_effects_version SET version = 99")
    assert "upgrade headrace" in headrace("effects", "migrate", "sqlite:///user.db").err


@pytest.mark.long
def test_a_state_that_no_handler_would_see_is_refused_or_noted(headrace: Headrace, tmp_path: Path):
    at = ("--database", "sqlite:///user.db")
    headrace("effects", "migrate", "sqlite:///user.db")
    assert "no rows in this database: check its name" in headrace("state", "set", *at, "billing", "orders/42", "1").err
    with closing(sqlite3.connect(tmp_path / "user.db")) as connection, connection:
        connection.execute(ROW.format("""X'7b7d'"""))
    large = f'"{"x" * 70_000}"'
    refused = headrace("state", "set", *at, "billing", "orders/42", large)
    assert (refused.code, "the limit is 65,536: give --max-bytes" in refused.err) == (1, True)
    kept = headrace("state", "set", *at, "--max-bytes", "100000", "billing", "orders/42", large)
    assert (kept.code, "no event" in kept.err) == (0, False)
    unknown = headrace("state", "set", *at, "billing", "orders/nosuch", "1")
    note = (
        "no event of stream orders/nosuch was applied yet: check its name; the handler finds the state with the first"
    )
    assert (unknown.code, note in unknown.err) == (0, True)


@pytest.mark.long
def test_impossible_values_of_states_are_refused_in_one_line(headrace: Headrace):
    at = ("--database", "sqlite:///user.db")
    headrace("effects", "migrate", "sqlite:///user.db")
    deep = "[" * 20_000 + "]" * 20_000
    line = headrace("state", "set", *at, "--origin", "here", "billing", "orders/42", deep).refused(2)
    assert line == "VALUE is nested too deeply for JSON: give --bytes to store it as it is"
    headrace("state", "set", *at, "--origin", "here", "--bytes", "billing", "orders/42", deep)
    (state,) = headrace("state", "list", *at, "--limit", 1 << 70, "--json").json
    assert base64.b64decode(state["state_base64"]) == deep.encode()
    for version in (1 << 31, 1 << 70):
        line = headrace("state", "set", *at, "--version", version, "billing", "orders/42", "1").refused(2)
        assert f"'--version': {version} is not in the range 1<=x<=2147483647" in line


@pytest.mark.long
def test_an_outbox_whose_provider_no_silo_has_is_named(headrace: Headrace, tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'user.db'}"
    headrace("effects", "migrate", url)
    with closing(sqlite3.connect(tmp_path / "user.db")) as connection, connection:
        connection.execute("INSERT INTO headrace_outbox VALUES (2, 'mistyped', 0, 'a/1', 1, X'00', 5, NULL)")
        connection.execute("INSERT INTO headrace_outbox VALUES (3, 'moved', 0, 'a/1', 1, X'00', 5, NULL)")
        connection.execute("INSERT INTO headrace_outbox_lane VALUES ('moved', 7, 'p', 1, '[]', '', 0)")
    problems = {each["provider"]: each["problem"] for each in headrace("effects", "outbox", url, "--json").json}
    assert problems["moved"] is None
    assert problems["mistyped"].startswith("no silo has moved events of this provider: check the provider name")


@pytest.mark.long
def test_state_is_listed_shown_set_and_deleted(headrace: Headrace, tmp_path: Path):
    at = ("--database", "sqlite:///user.db")
    headrace("effects", "migrate", "sqlite:///user.db")
    with closing(sqlite3.connect(tmp_path / "user.db")) as connection, connection:
        connection.execute(ROW.format("""X'7b7d'"""))
    assert headrace("state", "show", *at, "billing", "orders/42").out == "{}\n"
    assert headrace("state", "set", *at, "billing", "orders/42", '{"count": 3}').code == 0
    (state,) = headrace("state", "list", *at, "--json").json
    assert state == {
        "origin": "here", "subscription": "billing", "stream": "orders/42", "token": "7", "version": 1,
        "expires_at_us": None, "state": {"count": 3},
    }  # fmt: skip
    assert '{"count":3}' in headrace("state", "list", *at).out
    assert headrace("pipeline", "states", "s.parquet", *at, "--json").json == {"file": "s.parquet", "states": 1}
    assert "s.parquet: 1 state" in headrace("pipeline", "states", "s.parquet", *at).err
    assert headrace("state", "set", *at, "billing", "orders/42", "no json").code == 2
    headrace("state", "set", *at, "--bytes", "--version", "2", "billing", "orders/42", "no json")
    assert headrace("state", "show", *at, "billing", "orders/42", "--json").json["state_base64"] == "bm8ganNvbg=="
    assert headrace("state", "delete", *at, "billing", "orders/42").code == 0
    assert headrace("state", "show", *at, "billing", "orders/42").code == 1
    assert headrace("effects", "outbox", "sqlite:///user.db", "--json").json == []
    with closing(sqlite3.connect(tmp_path / "user.db")) as connection, connection:
        connection.execute("INSERT INTO headrace_outbox VALUES (1, 'default', 0, 'orders/42', 3, X'00', 5, 'refused')")
    (waiting,) = headrace("effects", "outbox", "sqlite:///user.db", "--json").json
    assert waiting == {
        "provider": "default", "batches": 1, "events": 3, "oldest_at_us": 5, "refused": 1, "problem": "refused",
    }  # fmt: skip
    assert "tried again by the silo: 1 batch\n" in headrace("effects", "outbox", "sqlite:///user.db", "--retry").err
    assert headrace("effects", "outbox", "sqlite:///user.db", "--json").json[0]["refused"] == 0
    (summary,) = headrace("effects", "list", "sqlite:///user.db", "--json").json
    assert (summary["streams"], summary["states"]) == (1, 0)
    with closing(sqlite3.connect(tmp_path / "user.db")) as connection, connection:
        event = "'here', 'billing', 'orders/42', 6, 0, 1, 'unknown', 1, 1"
        connection.execute(f"INSERT INTO headrace_unapplied VALUES ({event})")
    (unknown,) = headrace("effects", "unknown", "sqlite:///user.db", "--json").json
    assert (unknown["subscription"], unknown["stream"], unknown["token"]) == ("billing", "orders/42", "6")
    assert "1970-01-01" in headrace("effects", "unknown", "sqlite:///user.db").out
    assert headrace("effects", "list", "sqlite:///user.db", "--json").json[0]["unknown"] == 1
    assert "2nd" not in headrace("effects", "unknown", "sqlite:///user.db", "--subscription", "2nd", "--apply").out
    assert "applies them: 1 events" in headrace("effects", "unknown", "sqlite:///user.db", "--apply").err
    assert headrace("effects", "unknown", "sqlite:///user.db", "--json").json == []
    with closing(sqlite3.connect(tmp_path / "user.db")) as connection, connection:
        connection.execute("UPDATE headrace_unapplied SET outcome = 'applied'")
        connection.execute("UPDATE headrace_position SET written_at_us = 1, unapplied = 1")
    assert headrace("effects", "prune", "sqlite:///user.db", "--older-than", "soon").code == 2
    pruned = headrace("effects", "prune", "sqlite:///user.db", "--older-than", "30d", "--json").json
    assert pruned == {"deleted": 1, "ended_states": 0}
    with closing(sqlite3.connect(tmp_path / "user.db")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM headrace_unapplied").fetchone() == (1,)  # changed just now


@pytest.mark.long
def test_a_missing_driver_is_named_with_its_extra(start: Start):
    hidden = "import sys; sys.modules['psycopg'] = None; from headrace.cli.main import main; sys.exit(main())"
    for url in ("postgresql://127.0.0.1:1/x", "postgresql+psycopg://127.0.0.1:1/x"):
        for command in ("migrate", "list"):
            refused = ended(start("effects", command, url, program=[sys.executable, "-c", hidden]))
            why = "the database needs the package 'psycopg', which is not installed: pip install 'headrace[postgres]'"
            assert refused.refused(2) == why


def test_a_missing_file_is_refused_and_not_created(headrace: Headrace, tmp_path: Path):
    for arguments in (("effects", "list", "sqlite:///no.db"), ("state", "list", "--database", "sqlite:///no.db")):
        assert headrace(*arguments).refused(1).startswith("there is no file 'no.db': check its name")
    assert not (tmp_path / "no.db").exists()
