"""The broker that the tests of this folder share, and how its jars are found."""

import re
import time
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.kafka_servers import (
    FOLDER,
    POM,
    VERSION,
    KafkaCluster,
    KafkaServer,
    brokers_at,
    kafka_jars,
    new_cluster_id,
)
from benchmarks.servers import INSTALL, NotAvailable


def test_a_topic_can_be_made(kafka_server: KafkaServer) -> None:
    admin = AdminClient({"bootstrap.servers": kafka_server.address})
    (made,) = cast("Any", admin).create_topics([NewTopic("made", 2, 1)]).values()
    made.result(30)
    partitions = admin.list_topics("made", timeout=30).topics["made"].partitions
    assert [partition.leader for partition in partitions.values()] == [1, 1]


def test_no_thread_of_a_frozen_broker_runs(kafka_server: KafkaServer) -> None:
    """A thread that has not seen the signal would still acknowledge records."""
    tasks = Path(f"/proc/{kafka_server.pid}/task")
    for _ in range(5):
        with kafka_server.frozen():
            states = {stat.read_text().rpartition(")")[2].split()[0] for stat in tasks.glob("*/stat")}
        assert states == {"T"}


def test_missing_jars_are_an_error_that_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.delenv(INSTALL, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NotAvailable, match=re.escape("run mvn --quiet --batch-mode --file")):
        kafka_jars()


def test_the_version_is_that_of_the_pom() -> None:
    assert f"<kafka>{VERSION}</kafka>" in POM.read_text()


def test_ids_of_clusters_are_no_options_of_a_command() -> None:
    assert not [made for made in (new_cluster_id() for _ in range(1000)) if made.startswith("-") or len(made) != 22]


def test_nothing_answers_where_no_broker_is() -> None:
    assert brokers_at("127.0.0.1:1") == 0


@pytest.mark.slow
def test_three_brokers_form_a_cluster_that_outlives_one_of_them() -> None:
    with KafkaCluster() as cluster:
        assert brokers_at(cluster.address) == 3
        cluster.brokers[1].kill()
        while brokers_at(cluster.address) != 2:
            time.sleep(0.1)
        cluster.brokers[1].start()
        cluster.wait_for(3)
