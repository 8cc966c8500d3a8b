"""Blocks of pages that need something first: a cluster, tables, or a silo with events."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.silo.config_loader import load_config
from tests.deploy.manifests import free_ports
from tests.documents.reader import CodeBlock, Follower, code_blocks, wait_for
from tests.servers import postgres_server, postgres_url

__all__ = ("postgres_server", "postgres_url")

PUBLISH = "echo paid | headrace publish --data data --stream orders/42 --format raw"

pytestmark = pytest.mark.timeout(300)


def console(*commands: str) -> CodeBlock:
    return CodeBlock("test", 0, "console", "".join(f"$ {command}\n" for command in commands), "")


def commands_of(block: CodeBlock) -> list[str]:
    """The commands of a block of the shell, without the text that it prints."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return lines


def configuration(block: CodeBlock, folder: Path) -> Mapping[str, object]:
    """The tables of a block that a silo accepts as its configuration."""
    file = folder / "silo.toml"
    file.write_text(block.text)
    load_config(file, {"KAFKA_PASSWORD": "secret"}, {})
    return tomllib.loads(block.text)


@pytest.mark.long
def test_the_commands_of_the_pages_about_tokens(tmp_path: Path):
    with Follower(tmp_path, {"DIR": "data"}) as follower:
        follower.follow(console(PUBLISH))
        create, rotate = code_blocks("docs/security.md")[4:]
        for block in (code_blocks("docs/dashboard.md")[1], create):
            follower.follow(console(*commands_of(block)))
        follower.follow(console("headrace tokens create orders-service --data data --publish orders"))
        follower.follow(console(*commands_of(rotate)))
        listed = follower.follow(console("headrace tokens list --data data"))
    assert "orders-2027" in listed
    assert "operator" in listed


@pytest.mark.long
def test_a_silo_with_a_certificate_takes_a_client_with_a_token(tmp_path: Path):
    certificate, setting, create, program, *_ = code_blocks("docs/security.md")
    (port,) = free_ports(1)
    replaced = {"shop.example.com": "localhost", "9465": str(port), "workers = 2 ": "workers = 1 "}
    with Follower(tmp_path, replaced) as follower:
        follower.follow(console(*commands_of(certificate)))
        follower.follow(setting)
        token = follower.follow(console(*commands_of(create))).strip()
        follower.follow(console("headrace silo silo.toml"))
        follower.follow(program._replace(file="order.py"))
        follower.follow(console(f"python order.py {token}"))
        read = "headrace subscribe --data data 'orders/*' --from earliest --no-follow"
        assert follower.follow(console(read)) == "orders/42 0 placed\n"


@pytest.mark.parametrize(
    "page",
    [
        "docs/configuration.md",
        "docs/dashboard.md",
        "docs/operating-a-cluster.md",
        "docs/kafka.md",
        "docs/postgres.md",
        "docs/redis.md",
    ],
)
def test_configurations_are_accepted(page: str, tmp_path: Path):
    tables = [configuration(block, tmp_path) for block in code_blocks(page) if block.language == "toml"]
    assert tables


@pytest.mark.slow  # starts six silos; the tests of tests/cli/test_cli_cluster.py are quicker
def test_the_commands_for_a_cluster(tmp_path: Path):
    ports = free_ports(2)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "handlers.py").touch()
    for name, port in zip(("silo-7", "silo-8"), ports, strict=True):
        text = f'data = "data"\n[grpc]\nport = {port}\n[cluster]\nname = "{name}"\nmaturity_s = 1.0\n'
        (tmp_path / f"{name}.toml").write_text(text)
    first, *others = [block for block in code_blocks("docs/operating-a-cluster.md") if block.language != "toml"]
    replaced = {"10.0.0.7:9465": f"127.0.0.1:{ports[0]}", "127.0.0.1:9465": "127.0.0.1:0", "--port 9100": "--port 0"}
    with Follower(tmp_path, replaced) as follower:
        follower.follow(console(PUBLISH, *commands_of(first)))
        follower.follow(console("headrace silo silo-7.toml", "env headrace silo silo-8.toml &"))
        status = f"headrace cluster --server 127.0.0.1:{ports[0]}"
        wait_for(lambda: len(re.findall("running", follower.follow(console(status)))) == 2)
        for block in others:
            follower.follow(console(*commands_of(block)))


def test_an_adapter_of_your_own_is_declared_and_tested(tmp_path: Path):
    declaration, test = code_blocks("docs/adapters.md")
    assert tomllib.loads(declaration.text)["project"]["entry-points"]["headrace.adapters"]["nats"].count(":") == 1
    with Follower(tmp_path, {}) as follower:
        follower.follow(test)


@pytest.mark.long
def test_the_program_with_postgres(tmp_path: Path, postgres_url: str):
    (program,) = [block for block in code_blocks("docs/postgres.md") if block.language == "python"]
    with Follower(tmp_path, {"postgresql://headrace@localhost/headrace": postgres_url}) as follower:
        assert follower.follow(program) == "orders/42 b'paid'\n"


@pytest.mark.slow  # starts a silo and a consumer; tests/silo/test_traces_across_processes.py covers traces
def test_the_programs_with_traces(tmp_path: Path):
    _, setting, consumer = code_blocks("docs/tracing.md")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with Follower(tmp_path, {"localhost:9700": address}) as follower:
        follower.follow(setting)
        follower.follow(console(f"headrace silo --data data --listen {address}"))
        text = consumer.text.replace("print(batch.payloads())", "print(batch.payloads(), file=open('got', 'a'))")
        follower.follow(consumer._replace(file="consumer.py", text=text))
        follower.follow(console("python consumer.py &"))
        get = f"headrace subscriptions list --server {address} --json"
        wait_for(lambda: '"shipping"' in follower.follow(console(get)))
        follower.follow(console(f"echo paid | headrace publish --server {address} --stream orders/42 --format raw"))
        wait_for(lambda: (tmp_path / "got").exists() and (tmp_path / "got").read_text() == "[b'paid']\n")


ORM = """
from datetime import timedelta
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from headrace import Effects, Event, StreamState, Transaction


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


engine = create_engine("sqlite:///shop.db")
Base.metadata.create_all(engine)
order = Order(id=42)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("containing", "begin"),
    [
        ('@subscription("billing", "orders/*", effects=Effects(engine))\nasync def billing(event', ""),
        ("StreamState(ttl=timedelta(days=30))", ORM),
        ('b"paid", connection=session)', ORM),
    ],
)
def test_the_examples_of_effects_without_a_test_of_their_own(containing: str, begin: str, tmp_path: Path):
    """tests/effects/test_effects_docs.py has the others."""
    (block,) = [block for block in code_blocks("docs/effects.md") if containing in block.text]
    with Follower(tmp_path, {"postgresql+psycopg://localhost/shop": "sqlite+aiosqlite:///shop.db"}) as follower:
        follower.follow(console("headrace effects migrate sqlite:///shop.db"))
        follower.follow(block._replace(text=begin + block.text))


@pytest.mark.slow  # starts a silo; tests/cli/test_commands_with_silos.py covers the commands
def test_the_commands_of_the_client_page(tmp_path: Path):
    (block,) = [block for block in code_blocks("docs/client.md") if block.language == "console"]
    address = f"127.0.0.1:{free_ports(1)[0]}"
    (tmp_path / "orders.jsonl").write_text('{"order": "42"}\n')
    with Follower(tmp_path, {"127.0.0.1:9465": address}) as follower:
        follower.follow(console(f"headrace silo --data data --listen {address}"))
        assert "orders/42" in follower.follow(block)
