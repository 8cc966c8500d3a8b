"""Apache Kafka for benchmarks and tests: one broker, or several that form a cluster, on free ports of 127.0.0.1.

The jars come from Maven Central, as `tests/kafka/pom.xml` lists them. They are copied once into the user's cache.
"""

from __future__ import annotations

import base64
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from benchmarks.servers import (
    CHECKOUT,
    INSTALL,
    LOOPBACK,
    NotAvailable,
    Server,
    find_program,
    free_port,
    installing,
    java_home,
)

VERSION = "4.3.1"
FOLDER = "HEADRACE_KAFKA"
"""Environment variable: a folder with Kafka's jars, to be used in place of the one in the cache."""
POM = CHECKOUT / "tests" / "kafka" / "pom.xml"
PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
HEAP_MB = 256
_JVM = (f"-Xmx{HEAP_MB}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_SILENT = logging.getLogger("headrace.tests.kafka")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False
_STARTS = 3
"""Starts that are tried: another process may take a free port before the broker does."""
_STOP_S = 10.0
"""How long all threads of a broker may take to stop."""


def kafka_jars() -> Path:
    """Return the folder with Kafka's jars. Raises NotAvailable with the command that fetches them."""
    if chosen := os.environ.get(FOLDER):
        return Path(chosen)
    return maven_jars(POM, f"kafka-{VERSION}", f"Apache Kafka {VERSION}")


def maven_jars(pom: Path, name: str, title: str) -> Path:
    """Return the folder of the cache with the jars that a file of Maven lists. Fetch them if missing programs may be
    installed. Raises NotAvailable with the command that fetches them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    folder = cache / name
    if folder.is_dir():
        return folder
    if os.environ.get(INSTALL) != "1":
        raise NotAvailable(f"{title} is not in {folder}: run {shlex.join(_fetch(pom, folder))}")
    maven = find_program("mvn", debian_package="maven")
    cache.mkdir(parents=True, exist_ok=True)
    with installing():
        if not folder.is_dir():
            _install(maven, pom, cache, folder)
    return folder


def _fetch(pom: Path, folder: Path) -> Sequence[str]:
    where = ("-DincludeScope=runtime", f"-DoutputDirectory={folder}")
    return ("mvn", "--quiet", "--batch-mode", "--file", str(pom), PLUGIN, *where)


def _install(maven: str, pom: Path, cache: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache) as made:
        partial = Path(made, "jars")
        command = _fetch(pom, partial)
        fetched = subprocess.run(
            (maven, *command[1:]), stdin=subprocess.DEVNULL, capture_output=True, check=False, text=True
        )
        if fetched.returncode:
            raise NotAvailable(f"{shlex.join(command)} failed:\n{fetched.stdout}{fetched.stderr}")
        shutil.move(partial, folder)  # complete, or not there


def java_program() -> str:
    """Return the path of a Java 17 or newer. Raises NotAvailable."""
    return str(java_home() / "bin" / "java")


def java_command(main: str, *arguments: str) -> Sequence[str]:
    """Return the command that runs a Java class of Kafka's. Raises NotAvailable."""
    return (java_program(), *_JVM, "-cp", f"{kafka_jars()}/*", main, *arguments)


def new_cluster_id() -> str:
    """Return 22 characters. The first is no dash, which a command would take for an option."""
    while (made := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return made


class KafkaServer(Server):
    """A broker that is its own controller. With `voters`, one of several brokers: see `KafkaCluster`."""

    name = "kafka"

    def __init__(
        self,
        directory: Path | None = None,
        *,
        node: int = 1,
        cluster_id: str = "",
        voters: Mapping[int, int] | None = None,
        settings: Mapping[str, str | int] | None = None,
        users: Mapping[str, str] | None = None,
        listeners: Mapping[str, str] | None = None,
    ) -> None:
        """`voters` maps each node of the cluster to the port of its controller. `settings` are more lines of its
        configuration. With `users`, names and passwords, clients log in by SASL with SCRAM-SHA-512. `listeners` maps
        names of more listeners to their security protocols: `address_of` has their addresses."""
        super().__init__(directory)
        self.node = node
        self._cluster_id = cluster_id or new_cluster_id()
        self._voters = voters
        self._settings = settings or {}
        self._users = users or {}
        self._listeners = listeners or {}
        self._listener_ports: dict[str, int] = {}
        self._controller_port = 0

    def start(self) -> None:
        """See Server. A single broker is tried with other ports if another process has taken one."""
        for left in reversed(range(_STARTS)):
            try:
                return super().start()
            except NotAvailable as error:
                used = "BindException" in str(error) or "Address already in use" in str(error)
                if not used or not left or self._voters is not None:
                    raise
                self.port = self._controller_port = 0
                self._listener_ports.clear()
        return None

    def address_of(self, listener: str) -> str:
        """Return the address of one of `listeners`. The broker must have been started."""
        return f"{LOOPBACK}:{self._listener_ports[listener]}"

    def prepare(self) -> None:
        if self._voters is None:
            self._controller_port = self._controller_port or free_port()
        for name in self._listeners:
            self._listener_ports.setdefault(name, free_port())
        text = "".join(f"{name}={value}\n" for name, value in self._configuration().items())
        self._properties.write_text(text)
        if not (self.directory / "data" / "meta.properties").exists():
            self._format()

    def _format(self) -> None:
        users = (f"SCRAM-SHA-512=[name={name},password={secret}]" for name, secret in self._users.items())
        scram = [part for user in users for part in ("--add-scram", user)]
        arguments = ("format", "-t", self._cluster_id, "-c", str(self._properties), *scram)
        command = java_command("kafka.tools.StorageTool", *arguments)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, text=True)
        if done.returncode:
            raise NotAvailable(f"the folder of a broker cannot be formatted:\n{done.stdout}{done.stderr}")

    @property
    def _properties(self) -> Path:
        return self.directory / "server.properties"

    def _configuration(self) -> Mapping[str, str | int]:
        voters = self._voters or {self.node: self._controller_port}
        copies = len(voters)
        protocol = "SASL_PLAINTEXT" if self._users else "PLAINTEXT"
        controllers = ",".join(f"{node}@{LOOPBACK}:{port}" for node, port in voters.items())
        client = f"CLIENT://{LOOPBACK}:{self.port}"
        inside = f"INSIDE://{LOOPBACK}:{free_port()}" if self._users else ""
        more = [f"{name}://{self.address_of(name)}" for name in self._listeners]
        protocols = {"CLIENT": protocol, "INSIDE": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **self._listeners}
        sasl: dict[str, str | int] = {
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.client.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
        }
        return {
            "process.roles": "broker,controller",
            "node.id": self.node,
            "listeners": ",".join(
                filter(None, (client, inside, *more, f"CONTROLLER://{LOOPBACK}:{voters[self.node]}"))
            ),
            "advertised.listeners": ",".join(filter(None, (client, inside, *more))),
            "listener.security.protocol.map": ",".join(f"{name}:{of}" for name, of in protocols.items()),
            "inter.broker.listener.name": "INSIDE" if inside else "CLIENT",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": controllers,
            "log.dirs": str(self.directory / "data"),
            "auto.create.topics.enable": "false",
            "offsets.topic.num.partitions": 1,
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.num.partitions": 1,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": min(copies, 2),
            "share.coordinator.state.topic.num.partitions": 1,
            "share.coordinator.state.topic.replication.factor": copies,
            "group.initial.rebalance.delay.ms": 0,
            "log.cleaner.dedupe.buffer.size": 2 << 20,  # the default takes half of the heap
            "log.initial.task.delay.ms": 100,
            "log.retention.check.interval.ms": 500,
            "num.io.threads": 2,
            "num.network.threads": 2,
            "num.partitions": 1,
            **({"default.replication.factor": 3, "min.insync.replicas": 2} if copies > 1 else {}),
            **({"broker.session.timeout.ms": 3000, "broker.heartbeat.interval.ms": 500} if copies > 1 else {}),
            **(sasl if self._users else {}),
            **self._settings,
        }

    def command(self) -> Sequence[str]:
        return java_command("kafka.Kafka", str(self._properties))

    def environment(self) -> Mapping[str, str]:
        return {"KAFKA_HEAP_OPTS": ""}

    @contextmanager
    def frozen(self) -> Generator[None]:
        """Stop the broker's process meanwhile, as a machine that stands still. Raises NotAvailable."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            self._wait_until_stopped()
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def _wait_until_stopped(self) -> None:
        """The signal stops a thread only when the thread sees it. Until then the broker may still answer."""
        deadline = time.monotonic() + _STOP_S
        while set(_thread_states(self.pid)) != {"T"}:
            if time.monotonic() > deadline:
                raise NotAvailable(f"kafka at {self.address} did not stop within {_STOP_S:.0f} s of SIGSTOP")
            time.sleep(0.001)

    def ping(self) -> bool:
        if self._users:
            return "Kafka Server started" in self._log_end()
        return brokers_at(self.address) >= 1


class KafkaCluster:
    """Three brokers, each with a vote: kill one at a time. Topics have three replicas, two of which must be in sync."""

    def __init__(self, nodes: int = 3, settings: Mapping[str, str | int] | None = None) -> None:
        self._nodes = nodes
        self._settings = settings
        self._stack = ExitStack()
        self.brokers: Sequence[KafkaServer] = ()

    @property
    def address(self) -> str:
        return ",".join(broker.address for broker in self.brokers)

    def cpu_s(self) -> float:
        """Return the CPU seconds that the brokers have used so far."""
        return sum(broker.cpu_s() for broker in self.brokers)

    def wait_for(self, brokers: int) -> None:
        """Return when this many brokers are in the cluster. Raises NotAvailable."""
        deadline = time.monotonic() + KafkaServer.start_timeout_s
        while brokers_at(self.address) < brokers:
            if time.monotonic() > deadline:
                raise NotAvailable(f"{brokers} brokers of Kafka did not form a cluster at {self.address}")
            time.sleep(0.1)

    def __enter__(self) -> Self:
        voters = {node: free_port() for node in range(1, self._nodes + 1)}
        cluster_id = new_cluster_id()
        self.brokers = [
            _ClusterMember(node=node, cluster_id=cluster_id, voters=voters, settings=self._settings) for node in voters
        ]
        try:
            for broker in self.brokers:
                self._stack.callback(broker.close)
                broker.start()
            self.wait_for(self._nodes)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


class _ClusterMember(KafkaServer):
    """Starts without the others: it can answer only when a majority runs."""

    def ping(self) -> bool:
        return "Kafka" in self._log_end()


def brokers_at(address: str) -> int:
    """Return how many brokers the cluster has, 0 if it does not answer."""
    client = AdminClient({"bootstrap.servers": address, "log_level": 0}, logger=_SILENT)
    try:
        return len(client.list_topics(timeout=2).brokers)
    except KafkaException:
        return 0


def _thread_states(pid: int) -> Sequence[str]:
    """Return the state of each thread of a process, as /proc names it: "T" is stopped."""
    found: list[str] = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            found.append(stat.read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue  # the thread has ended
    return found
