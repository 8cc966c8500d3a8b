"""`headrace cluster`, and `headrace queues` at silos: real ones, that share their queues."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest

from headrace.proto.v1 import cluster_pb2 as pb
from tests.cli.commandline import Headrace
from tests.silo.talking import PATIENCE_S, TIMES, SiloOfCluster, shares, silos, wait_until


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SiloOfCluster]]:
    """Silos a and b. A test leaves them as it found them."""
    with silos(tmp_path_factory.mktemp("pair"), "ab") as both:
        evenly(both[0])
        yield both


def evenly(silo: SiloOfCluster, names: str = "ab") -> None:
    """Wait until these silos have the eight queues between them."""
    wait_until(
        silo.address, lambda cluster: [shares(cluster).get(name) for name in names] == [8 // len(names)] * len(names)
    )


def test_any_silo_tells_of_all(pair: list[SiloOfCluster], headrace: Headrace):
    evenly(pair[0])
    for asked in pair:
        told = headrace("cluster", "--server", asked.address, "--json").json
        assert [(silo["name"], silo["state"], silo["address"]) for silo in told["silos"]] == [
            (silo.name, "running", silo.address) for silo in pair
        ]
        assert sorted(queue for silo in told["silos"] for queue in silo["queues"]["default"]) == list(range(8))
        assert told["providers"] == [
            {"provider": "default", "queues": 8, "unserved": 0, "silos": 2,
             "fewest": 4, "mean": 4.0, "most": 4, "skew": 1.0}
        ]  # fmt: skip


def test_the_tables_are_for_people(pair: list[SiloOfCluster], headrace: Headrace):
    evenly(pair[0])
    server = ["--server", f"127.0.0.1:1,{pair[0].address}"]
    out = headrace("cluster", *server).out
    for silo in pair:
        assert re.search(rf"^{silo.name} +running +{silo.address} +default: [0-7 -]+ s ago", _flat(out), re.MULTILINE)
    assert re.search(r"^default +8 +0 +2 +4 +4 +4 +1 *$", out, re.MULTILINE)
    out = headrace("queues", *server).out
    assert re.search(r"^ +7 +[ab] +\w+ +\d+ +0 +0 +0 +0\.0 +– +– +0 +0% *$", out, re.MULTILINE)


def _flat(out: str) -> str:
    """Without how long ago it was."""
    return re.sub(r"[\d.,]+ s ago", "s ago", out)


@pytest.mark.long
def test_queues_show_their_owner_and_lag(pair: list[SiloOfCluster], headrace: Headrace):
    at = ["--server", pair[1].address]
    assert headrace("subscriptions", "create", *at, "all", "shop/*", "--from", "earliest").code == 0
    assert headrace("publish", *at, "--stream", "shop/1", "--format", "raw", stdin=b"1\n2\n3\n").code == 0
    document = headrace("queues", *at, "--json").json
    (behind,) = [queue for queue in document if queue["lag_batches"]]
    assert behind["silo"] in ("a", "b")
    assert behind["epoch"] >= 1
    assert behind["lag_events"] == 3
    assert not behind["lag_estimated"]
    assert behind["lag_s"] > 0
    assert behind["cache_limit_bytes"] > 0
    (stored,) = [queue for queue in headrace("queues", "--data", _data(pair), "--json").json if queue["lag_batches"]]
    assert (stored["queue"], stored["lag_events"]) == (behind["queue"], 3)

    assert headrace("subscriptions", "delete", *at, "all").code == 0
    assert not any(queue["lag_batches"] for queue in headrace("queues", *at, "--json").json)


def _data(pair: list[SiloOfCluster]) -> str:
    match = pair[0].talking.until_said(r"silo is ready: data in ([^;]+);")
    return match[1]


@pytest.mark.long
def test_a_drained_silo_gives_its_queues_away_until_it_is_undrained(pair: list[SiloOfCluster], headrace: Headrace):
    evenly(pair[0])
    at = ["--server", pair[0].address]
    ran = headrace("cluster", "drain", "b", *at, "--timeout", "5")
    assert (ran.code, ran.err) == (0, "headrace: silo 'b' is drained\n")
    evenly(pair[0], "a")
    told = headrace("cluster", *at, "--json").json
    assert [silo["state"] for silo in told["silos"]] == ["running", "drained"]
    assert told["providers"][0]["silos"] == 1

    assert headrace("cluster", "undrain", "b", *at, "--json").json == {"silo": "b", "drained": False}
    evenly(pair[0])


@pytest.mark.long
def test_draining_the_last_silo_reports_queues_without_an_owner(pair: list[SiloOfCluster], headrace: Headrace):
    evenly(pair[0])
    says = "headrace: no silo is left to serve the queues of provider 'default': undrain one, or start another\n"
    for first, last in (("a", "b"), ("b", "a")):
        for asked in pair:
            at = ["--server", asked.address]
            assert headrace("cluster", "drain", first, *at).err == f"headrace: silo '{first}' is drained\n"
            ran = headrace("cluster", "drain", last, *at)
            assert (ran.code, ran.err) == (0, f"headrace: silo '{last}' is drained\n{says}")
            again = headrace("cluster", "drain", last, *at, "--json")
            assert (again.json, again.err) == ({"silo": last, "drained": True}, says)
            for silo in "ab":
                assert headrace("cluster", "undrain", silo, *at).code == 0
            evenly(asked)


@pytest.mark.long
def test_stopped_agents_are_stopped_wherever_the_queue_is(pair: list[SiloOfCluster], headrace: Headrace):
    evenly(pair[0])
    at = ["--server", pair[1].address]
    ran = headrace("cluster", "stop-agents", *at, "--queue", "0", "--queue", "7")
    assert (ran.code, ran.err) == (0, "headrace: agents of queues 0, 7 of provider 'default' are stopped\n")

    def stopped() -> list[int]:
        return [one["queue"] for one in headrace("queues", *at, "--json").json if one["state"] == "stopped"]

    assert stopped() == [0, 7]
    assert headrace("cluster", "drain", "a", *at).code == 0
    evenly(pair[1], "b")
    assert stopped() == [0, 7]
    assert headrace("cluster", "undrain", "a", *at).code == 0
    evenly(pair[1])
    assert stopped() == [0, 7]
    assert headrace("cluster", "start-agents", *at, "--queue", "7", "--json").json == {
        "provider": "default", "queues": [7], "stopped": False,
    }  # fmt: skip
    assert stopped() == [0]
    assert headrace("cluster", "start-agents", *at).code == 0
    assert stopped() == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["cluster", "drain", "c"], 1, "there is no living silo 'c': there is a, b"),
        (["cluster", "undrain", "c"], 1, "there is no living silo 'c': there is a, b"),
        (["cluster", "stop-agents", "--queue", "8"], 2, "queues: provider 'default' has 8 queues, from 0"),
        (["cluster", "start-agents", "--provider", "x"], 1, "this silo has no provider 'x'"),
        (["cluster", "stop-agents", "--timeout", "0"], 2, "'--timeout': 0.0 is not in the range"),
        (["cluster", "drain"], 2, "Missing argument 'SILO'"),
        (["queues", "--provider", "x"], 1, "no silo has a provider 'x': the silos have default"),
    ],
)
def test_impossible_arguments_are_refused_in_one_line(
    arguments: list[str], code: int, reason: str, pair: list[SiloOfCluster], headrace: Headrace
):
    assert reason in headrace(*arguments, "--server", pair[0].address).refused(code)


def test_it_needs_a_silo(headrace: Headrace):
    assert "Missing option '--server'" in headrace("cluster").refused(2)
    assert "Got unexpected extra arguments (drain b)" in headrace("cluster", "--server", "h:1", "drain", "b").refused(2)


@pytest.mark.long
def test_silos_that_do_not_answer_and_dead_ones_are_shown(tmp_path: Path, headrace: Headrace):
    with silos(tmp_path, "ab") as (asked, other):
        evenly(asked)
        other.signal(signal.SIGSTOP)
        at = ["--server", asked.address]
        # The silo that is asked knows the leases of the other one from its own view, which is read ten times a second.
        wait_until(asked.address, lambda cluster: [len(silo.providers[0].queues) for silo in cluster.silos] == [4, 4])
        told = headrace("cluster", *at, "--json").json
        assert [silo["state"] for silo in told["silos"]] == ["running", "unreachable"]
        assert len(told["silos"][1]["queues"]["default"]) == 4
        assert told["providers"][0]["unserved"] == 4
        queues = headrace("queues", *at, "--json").json
        assert [queue["state"] for queue in queues if queue["silo"] == "b"] == ["unknown"] * 4
        other.signal(signal.SIGKILL)
        evenly(asked, "a")
        told = headrace("cluster", *at, "--json").json
        assert [silo["state"] for silo in told["silos"]] == ["running", "dead"]
        assert told["providers"][0]["unserved"] == 0


def test_a_name_that_another_process_has_is_refused(pair: list[SiloOfCluster], headrace: Headrace):
    directory = Path(_data(pair)).parent
    ran = headrace("silo", directory / "a.toml")
    holder = pair[0].talking.process.pid
    assert ran.code == 1
    assert ran.err.splitlines()[-1] == (
        f"headrace: the name of silo 'a' is used by process {holder}: stop that one first"
    )


@pytest.mark.long
def test_a_name_that_a_process_of_this_machine_has_is_refused_on_postgresql(
    tmp_path: Path, postgres_url: str, headrace: Headrace
):
    with silos(tmp_path, "a", store=postgres_url) as (older,):
        said = f"the name of silo 'a' is used by process {older.talking.process.pid}: stop that one first"
        assert headrace("silo", tmp_path / "a.toml").err.splitlines()[-1] == f"headrace: {said}"
        assert older.talking.process.poll() is None


@pytest.mark.long
def test_of_two_with_a_name_on_two_machines_the_older_one_ends(tmp_path: Path, postgres_url: str):
    with silos(tmp_path, "a", store=postgres_url) as (older,):
        (tmp_path / "data" / "locks" / ".silos" / "a.lock").unlink()  # as on another machine
        with silos(tmp_path, "a", store=postgres_url) as (newer,):
            assert older.talking.ended() == 1
            assert re.search(
                r"^headrace: silo 'a', incarnation 1, is superseded by incarnation 2: another process uses its name$",
                older.talking.said, re.MULTILINE,
            )  # fmt: skip
            newer.signal(signal.SIGTERM)
            assert newer.talking.ended() == 0


LONG = TIMES.replace("lease_s = 15", "lease_s = 3600").replace("dead_after_s = 10", "dead_after_s = 3600")
"""No lease ends while a test runs."""


@pytest.mark.long
def test_a_process_of_this_machine_is_known_to_be_dead_at_once_on_postgresql(
    tmp_path: Path, postgres_url: str, headrace: Headrace
):
    with silos(tmp_path, "ab", store=postgres_url, times=LONG) as (a, b):
        evenly(a)
        b.signal(signal.SIGKILL)
        evenly(a, "a")
        at = ["--server", a.address]
        assert "silo 'a' is a member of the cluster: stop it" in headrace("cluster", "forget", "a", *at).refused(1)
        assert headrace("cluster", "forget", "b", *at).err == "headrace: silo 'b' is forgotten\n"
        assert [silo["name"] for silo in headrace("cluster", *at, "--json").json["silos"]] == ["a"]
        assert "there is no silo 'b' to forget: there is a" in headrace("cluster", "forget", "b", *at).refused(1)
        a.signal(signal.SIGKILL)
        a.talking.ended()
        with silos(tmp_path, "a", store=postgres_url, times=LONG) as (again,):
            evenly(again, "a")


@pytest.mark.long
def test_a_probe_is_answered_while_the_store_does_not_answer(tmp_path: Path, postgres_url: str):
    with silos(tmp_path, "a", store=postgres_url) as (silo,), psycopg.connect(postgres_url) as connection:
        channel: Any = grpc.insecure_channel(silo.address)
        connection.execute("LOCK TABLE silos, leases, providers, entries, tokens IN ACCESS EXCLUSIVE MODE")
        probe = channel.unary_unary("/headrace.v1.ClusterService/ProbeSilo")
        for name in ("a", "b"):
            request = pb.ProbeSiloRequest(silo=name).SerializeToString()
            answer = pb.ProbeSiloResponse.FromString(probe(request, timeout=PATIENCE_S))
            assert answer.here == (name == "a")
        channel.close()
        connection.rollback()


def test_a_silo_without_a_cluster_does_not_join_the_data_of_one(tmp_path: Path, headrace: Headrace):
    with silos(tmp_path, "a") as (a,):
        evenly(a, "a")
        refused = headrace("silo", "--data", tmp_path / "data", "--listen", "127.0.0.1:0").refused(1)
        assert "data' is used by a cluster (silo 'a'): add [cluster]" in refused


@pytest.mark.long
def test_different_settings_and_queues_without_an_owner_are_shown(tmp_path: Path, headrace: Headrace):
    kept = ", ".join(f'{queue} = "{silo}"' for queue, silo in enumerate("aaaabbbc"))
    mapping = f'balancer = "static"\nmapping = {{{kept}}}\n'
    with silos(tmp_path, "a", times=TIMES + mapping) as (a,), silos(tmp_path, "b") as (b,):
        a.talking.until_said(
            r"silo 'b' has other settings in \[cluster\] than this one: balancer = lease-count \(here static\), mapping"
        )
        b.talking.until_said(r"silo 'a' has other settings in \[cluster\] than this one: balancer = static")
        at = ["--server", a.address]
        told = headrace("cluster", *at, "--json").json
        assert told["differences"]["balancer"] == {"static": ["a"], "lease-count": ["b"]}
        assert set(told["differences"]) == {"balancer", "mapping"}
        shown = headrace("cluster", *at)
        assert "the silos differ in [cluster] balancer: static at a; lease-count at b" in shown.err
        b.signal(signal.SIGTERM)
        assert b.talking.ended() == 0
        wait_until(a.address, lambda cluster: [queue.index for queue in cluster.unserved] == [4, 5, 6, 7])
        document = headrace("cluster", *at, "--json").json
        assert [one["queue"] for one in document["unserved"]] == [4, 5, 6, 7]
        assert {one["reason"] for one in document["unserved"]} <= {
            "it is kept for silo b, which is not there",
            "no silo that is there may serve it: see the balancer and its list",
        }
        assert "unserved for" in headrace("cluster", *at).out
