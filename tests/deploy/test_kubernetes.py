"""The manifests are valid, agree with the configuration of the silo, and a silo runs with it as a pod does."""

import json
import re
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import URLError

import kubernetes_validate  # pyright: ignore[reportMissingTypeStubs]
import pytest
import yaml

from headrace.silo.config_loader import load_config
from headrace.silo.services.autoscaling import target_of
from tests.certificates import Authority
from tests.cli.commandline import Start, ended
from tests.deploy.manifests import DEPLOY, VARIANTS, free_ports, moved, of_kind, rendered, silo_container, silo_file


def tls_folder(folder: Path) -> Path:
    """The secret `headrace-tls`, as Kubernetes mounts it."""
    folder.mkdir()
    authority = Authority(folder, "ca")
    files = authority.issue("localhost", "127.0.0.1")
    files.certificate.rename(folder / "tls.crt")
    files.key.rename(folder / "tls.key")
    authority.certificate.rename(folder / "ca.crt")
    return folder


def variables_of_a_pod(container: dict[str, Any]) -> dict[str, str]:
    """The variables of the first pod."""
    found: dict[str, str] = {}
    variables: list[dict[str, Any]] = container.get("env") or []
    for each in variables:
        if "value" in each:
            found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], each["value"])
        elif "fieldRef" in each["valueFrom"]:
            assert each["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
            found[each["name"]] = "headrace-0"
        else:
            assert each["valueFrom"]["secretKeyRef"] == {"name": "headrace-store", "key": "url"}
            found[each["name"]] = "postgresql://headrace@db/headrace"
    return found


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_manifests_are_valid(kubectl: str, variant: str):
    manifests = rendered(kubectl, variant)
    assert len(manifests) == 5
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.34", strict=True)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_configuration_of_a_pod_is_accepted(kubectl: str, variant: str, tmp_path: Path):
    manifests = rendered(kubectl, variant)
    file = tmp_path / "silo.toml"
    file.write_text(silo_file(manifests))
    config = load_config(file, variables_of_a_pod(silo_container(manifests)), {})
    assert config.providers["default"].adapter == {"base": "log"}.get(variant, variant)
    if variant == "base":
        assert config.cluster is None
        return
    assert config.cluster is not None
    assert (config.cluster.name, config.cluster.address) == ("headrace-0", "headrace-0.headrace-silos:9465")
    assert config.cluster.store is not None


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pod_has_the_time_to_stop_in_order(kubectl: str, variant: str, tmp_path: Path):
    """Calls have `drain_s` seconds, then handlers have as long; preStop comes first."""
    manifests = rendered(kubectl, variant)
    file = tmp_path / "silo.toml"
    file.write_text(silo_file(manifests))
    config = load_config(file, variables_of_a_pod(silo_container(manifests)), {})
    pod = of_kind(manifests, "StatefulSet")["spec"]["template"]["spec"]
    sleep_s = silo_container(manifests)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= sleep_s + 2 * config.drain_s + 10


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_names_and_ports_agree(kubectl: str, variant: str):
    manifests = rendered(kubectl, variant)
    stateful, container, text = of_kind(manifests, "StatefulSet"), silo_container(manifests), silo_file(manifests)
    services = {each["metadata"]["name"]: each for each in manifests if each["kind"] == "Service"}
    assert stateful["spec"]["serviceName"] in services
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert all(str(port) in text for port in ports.values())
    assert {port["targetPort"] for each in services.values() for port in each["spec"]["ports"]} <= set(ports)
    probes = (container[name]["httpGet"] for name in ("livenessProbe", "startupProbe", "readinessProbe"))
    assert {(probe["path"], probe["port"]) for probe in probes} == {("/livez", "http"), ("/healthz", "http")}
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/data", "/tls", "/etc/headrace"} <= mounted
    assert container["args"][1].startswith("/etc/headrace/")


def answer(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status
    except URLError:
        return 0


def test_a_silo_with_the_file_of_a_pod_serves_its_probes_and_stops_in_order(kubectl: str, tmp_path: Path, start: Start):
    manifests = rendered(kubectl, "base")
    http, grpc, native = free_ports(3)
    tls = tls_folder(tmp_path / "tls")
    folders = {'"/data/': f'"{tmp_path}/', '"/tls/': f'"{tls}/'}
    (tmp_path / "silo.toml").write_text(
        moved(silo_file(manifests), **folders, **{"9464": http, "9465": grpc, "9466": native})
    )
    process = start("silo", "silo.toml")
    container = silo_container(manifests)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        path = container[probe]["httpGet"]["path"]
        while answer(f"http://127.0.0.1:{http}{path}") != 200:
            assert process.poll() is None, ended(process)
            time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 0


def test_the_trigger_of_keda_is_one_that_the_silo_accepts():
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "keda" / "scaledobject.yaml").read_text()))
    (trigger,) = documents[1]["spec"]["triggers"]
    metadata = {**trigger["metadata"], "tokenFromEnv": "hr_1"}  # KEDA puts in the value of the variable
    target = target_of(json.loads(json.dumps(metadata)))
    assert (target.provider, target.subscription, target.token) == ("default", "bills", "hr_1")
    assert (target.lag_threshold, target.activation_lag_threshold) == (1000, 0)
