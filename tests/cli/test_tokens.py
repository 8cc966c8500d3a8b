"""`headrace tokens`, and the flags of `headrace silo` that say which clients may connect."""

import hashlib
import os
import re
import sqlite3
import subprocess
from contextlib import closing, redirect_stdout
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.store.datadir import open_data_directory
from tests.cli.commandline import ENVIRONMENT, Headrace, Ran, Start, ended
from tests.cli.forking import forking
from tests.silo.talking import silos

TOKEN = re.compile(r"hr_[A-Za-z0-9_-]{43}\n")


@pytest.fixture
def tokens(headrace: Headrace):
    """Run `headrace tokens` on the data directory d."""

    def run(command: str, *arguments: str) -> Ran:
        return headrace("tokens", command, "--data", "d", *arguments)

    return run


def stored(directory: Path) -> list[tuple[str, bytes, str]]:
    with closing(sqlite3.connect(directory / "d" / "control.db")) as connection:
        return connection.execute("SELECT name, hash, permissions FROM tokens ORDER BY name").fetchall()


def test_a_token_is_printed_once_and_only_its_hash_is_kept(tokens: Headrace, tmp_path: Path):
    made = tokens("create", "orders", "--publish", "orders*", "--publish", "audit", "--subscribe", "*")

    shown = "headrace: token 'orders' is shown only now; running silos know it within 2 s\n"
    assert (made.code, made.err) == (0, f"headrace: created data directory 'd'\n{shown}")
    assert TOKEN.fullmatch(made.out)
    token = made.out.strip()
    hashed = hashlib.sha256(token.encode()).digest()
    assert stored(tmp_path) == [("orders", hashed, '{"publish":["orders*","audit"],"subscribe":["*"]}')]
    files = [file for file in (tmp_path / "d").rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if token.encode() in file.read_bytes()]
    assert token not in tokens("list").out + tokens("list", "--json").out


def test_a_token_that_is_not_there_makes_no_control_store(tokens: Headrace, tmp_path: Path):
    open_data_directory(tmp_path / "d")
    line = tokens("revoke", "orders").refused(1)
    assert line == "data directory 'd' has no control.db: check its name, or create a token in it first"
    assert [each.name for each in (tmp_path / "d").iterdir()] == ["headrace.json"]


def test_every_token_is_another(tokens: Headrace):
    made = [tokens("create", name, "--manage", "*").out for name in ("a", "b")]
    assert len(set(made)) == 2


@pytest.mark.parametrize("json", [(), ("--json",)])
def test_a_token_that_cannot_be_shown_is_revoked(json: tuple[str, ...], tokens: Headrace, tmp_path: Path):
    tokens("create", "other", "--manage", "*")
    command = ["tokens", "create", "orders", "--data", "d", "--publish", "orders", *json]
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        process = forking().start(command, cwd=tmp_path, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE)
    finally:
        os.close(full)
    ran = ended(process)
    assert (ran.code, ran.err.splitlines()) == (
        1,
        [
            "headrace: token 'orders' is revoked, because it could not be shown",
            "headrace: stdout: No space left on device",
        ],
    )
    assert [name for name, *_ in stored(tmp_path)] == ["other"]


def test_a_token_that_can_neither_be_shown_nor_revoked_is_named(
    tokens: Headrace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tokens("create", "other", "--manage", "*")
    with closing(sqlite3.connect(tmp_path / "d" / "control.db")) as database, database:
        database.execute("CREATE TRIGGER t BEFORE DELETE ON tokens BEGIN SELECT RAISE(ABORT, 'refused'); END")
    with Path("/dev/full").open("w") as full, redirect_stdout(full):
        assert main(["tokens", "create", "orders", "--data", str(tmp_path / "d"), "--publish", "orders"]) == 1
    named, why = capsys.readouterr().err.splitlines()
    assert (
        named == "headrace: token 'orders' could not be shown or revoked: run `headrace tokens revoke orders` "
        "with the same --data or --store"
    )
    assert "No space left on device" in why


def test_json_tells_all_of_a_token(tokens: Headrace):
    made = tokens("create", "orders", "--publish", "orders*", "--json").json
    assert TOKEN.fullmatch(made.pop("token") + "\n")
    assert made == {**made, "name": "orders", "publish": ["orders*"], "subscribe": [], "manage": []}
    tokens("create", "audit", "--manage", "*", "--subscribe", "a", "--subscribe", "b")
    audit, orders = tokens("list", "--json").json
    assert orders == made
    assert audit == {**audit, "name": "audit", "publish": [], "subscribe": ["a", "b"], "manage": ["*"]}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00", audit["created_at"])


def test_the_list_is_a_table_for_people(tokens: Headrace):
    tokens("create", "orders", "--publish", "orders*", "--publish", "audit", "--manage", "*")
    header, row = [line for line in tokens("list").out.splitlines() if line.strip()]
    assert header.split() == ["name", "client", "publish", "subscribe", "manage", "created_at"]
    assert row.split()[:-1] == ["orders", "orders", "orders*", "audit", "–", "*"]


def test_a_revoked_token_is_gone_and_its_name_free(tokens: Headrace):
    first = tokens("create", "orders", "--publish", "*").out
    assert "a token named 'orders' exists: use another name" in tokens("create", "orders", "--publish", "x").refused(1)
    assert tokens("revoke", "orders").err == "headrace: revoked: token 'orders'\n"
    assert tokens("list", "--json").json == []
    assert tokens("revoke", "orders").refused(1) == "there is no token named 'orders'"
    assert tokens("create", "orders", "--publish", "*").out != first
    assert tokens("revoke", "orders", "--json").json == {"revoked": "orders"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["orders"], "token 'orders' would have no permission: give it --publish, --subscribe or --manage"),
        (
            ["orders", "--publish", "*orders"],
            "'*orders' is not a pattern of namespaces: write a namespace, as in orders, or",
        ),
        (
            ["orders", "--publish", "orders/*"],
            "'orders/*' is not a pattern of namespaces: a permission holds for all keys",
        ),
        (
            ["my orders", "--publish", "*"],
            "'my orders' is not a token name: letters, digits, dot, dash and underscore",
        ),
        (["--publish", "*"], "Missing argument 'NAME'. (see headrace tokens create --help)"),
    ],
)
def test_a_wrong_token_is_refused_before_anything_is_made(
    tokens: Headrace, tmp_path: Path, arguments: list[str], why: str
):
    assert tokens("create", *arguments).refused(2).startswith(why)
    assert not (tmp_path / "d").exists()


def test_a_directory_that_is_not_there_has_no_tokens(tokens: Headrace, tmp_path: Path):
    for command in (["list"], ["revoke", "orders"]):
        assert tokens(*command).refused(1).startswith("'d' is no data directory: check its name")
    assert not (tmp_path / "d").exists()


def test_a_directory_that_is_no_data_directory_is_left_alone(tokens: Headrace, tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "letter.txt").write_text("dear")
    assert "not made by headrace" in tokens("create", "orders", "--publish", "*").refused(1)
    assert [file.name for file in (tmp_path / "d").iterdir()] == ["letter.txt"]


def test_tokens_come_and_go_while_a_silo_runs(tokens: Headrace, start: Start):
    process = start("silo", "--data", "d", "--port", "0")
    assert process.stderr is not None
    for line in process.stderr:
        if b"silo is ready" in line:
            break
    assert TOKEN.fullmatch(tokens("create", "orders", "--publish", "*").out)
    assert [token["name"] for token in tokens("list", "--json").json] == ["orders"]
    assert tokens("revoke", "orders").code == 0
    process.terminate()
    assert ended(process).code == 0


# In the database of a cluster


@pytest.mark.long
def test_a_token_made_in_the_store_of_a_cluster_is_known_to_its_silos(
    headrace: Headrace, tmp_path: Path, postgres_url: str
):
    at = ("--store", postgres_url)
    token = headrace("tokens", "create", "orders", "--publish", "n", *at).out.strip()
    assert [one["name"] for one in headrace("tokens", "list", "--json", HEADRACE_CLUSTER__STORE=postgres_url).json] == [
        "orders"
    ]
    with silos(tmp_path, "a", store=postgres_url, grpc='auth = "tokens"') as (silo,):
        publish = ("publish", "--server", silo.address, "--stream", "n/k", "--format", "raw")
        assert headrace(*publish, stdin=b"0\n").code == 1
        assert headrace(*publish, stdin=b"0\n", HEADRACE_TOKEN=token).code == 0
    assert headrace("tokens", "revoke", "orders", *at).code == 0
    assert headrace("tokens", "list", "--json", *at).json == []


def test_a_store_in_a_variable_gives_way_to_a_directory_that_is_typed(headrace: Headrace, tmp_path: Path):
    create = ("tokens", "create", "orders", "--publish", "*", "--data", "d")
    assert headrace(*create, HEADRACE_CLUSTER__STORE="postgresql://127.0.0.1:1/x").code == 0
    assert [name for name, _, _ in stored(tmp_path)] == ["orders"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "Missing option '--data' or '--store'."),
        (
            ["--data", "d", "--store", "postgresql://me:secret@db/x"],
            "--data and --store exclude each other: name a data directory or a database",
        ),
        (
            ["--data", "postgresql://me:secret@db/x"],
            "--data takes a directory, not a URL: give the URL of cluster.store as --store",
        ),
    ],
)
def test_tokens_are_in_a_directory_or_in_a_database(headrace: Headrace, tmp_path: Path, arguments: list[str], why: str):
    assert headrace("tokens", "list", *arguments).refused(2).removesuffix(" (see headrace tokens list --help)") == why
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("store", ["d", "memory", "sqlite:///secret.db", "mysql://me:secret@db/x"])
def test_a_store_that_is_no_url_of_postgres_is_refused_and_not_shown(headrace: Headrace, tmp_path: Path, store: str):
    why = headrace("tokens", "list", "--store", store).refused(2)
    assert why.startswith("--store is no URL of a PostgreSQL database: write postgresql://USER:PASSWORD@HOST/DATABASE")
    assert "secret" not in why
    assert not list(tmp_path.iterdir())


def test_a_store_that_does_not_answer_is_named_without_its_password(headrace: Headrace):
    why = headrace("tokens", "list", "--store", "postgresql://me:secret@127.0.0.1:1/x").refused(1)
    assert why.startswith("postgresql://me:***@127.0.0.1:1/x: ")
    assert "secret" not in why


def test_commands_on_a_data_directory_do_not_make_one_of_a_url(headrace: Headrace, tmp_path: Path):
    for command in (["streams", "list"], ["publish", "--stream", "n/k"], ["queues"]):
        why = headrace(*command, "--data", "postgresql://me:secret@db/x").refused(2)
        assert why.startswith("--data takes a directory, not a URL: if the control data is in a database, ask")
    assert not list(tmp_path.iterdir())


# Flags


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--listen", "0.0.0.0:0"], "grpc.host is '0.0.0.0', which other machines may reach, and there is no TLS"),
        (["--listen", "[::]:0"], "grpc.host is '::', which other machines may reach, and there is no TLS"),
        (["--listen", "silo.example.org:0"], "grpc.host is 'silo.example.org', which other machines may reach"),
        (["--listen", "9465"], "'9465' is no address: write HOST:PORT, as in 127.0.0.1:9465 or [::1]:9465"),
        (["--listen", "127.0.0.1:65536"], "'127.0.0.1:65536' is no address: ports are numbers up to 65535"),
        (["--certificate", "c"], "grpc.certificate is given without grpc.key: TLS needs both"),
        (["--key", "k"], "grpc.key is given without grpc.certificate: TLS needs both"),
        (["--client-ca", "ca"], "grpc.client_ca is given without grpc.certificate and grpc.key"),
        (["--auth", "token"], 'command line: [grpc] auth = "token": expected "none" or "tokens"'),
        (
            ["--listen", "0.0.0.0:0", "--insecure", "--certificate", "c", "--key", "k"],
            "grpc.insecure turns TLS off",
        ),
    ],
)
def test_access_is_checked_before_anything_is_served(headrace: Headrace, tmp_path: Path, flags: list[str], why: str):
    assert headrace("silo", "--data", "d", *flags).refused(2).startswith(why)
    assert not (tmp_path / "d").exists()


def test_tokens_need_a_data_directory(headrace: Headrace, tmp_path: Path):
    (tmp_path / "silo.toml").write_text('[providers.default]\nadapter = "memory"\n')
    refused = headrace("silo", "silo.toml", "--listen", "127.0.0.1:0", "--auth", "tokens").refused(2)
    assert refused.startswith("grpc.auth is tokens, and tokens are kept in a data directory")


def test_variables_count_as_flags_do(headrace: Headrace):
    variables = {"HEADRACE_GRPC__HOST": "0.0.0.0", "HEADRACE_GRPC__PORT": "0"}
    assert "which other machines may reach" in headrace("silo", "--data", "d", **variables).refused(2)
