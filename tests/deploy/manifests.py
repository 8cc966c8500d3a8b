"""The files of `deploy/`, as their programs read them."""

import json
import re
import socket
import subprocess
from contextlib import ExitStack
from typing import Any

import pytest
import yaml

from benchmarks.servers import NotAvailable, find_program
from tests.plain_english import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
VARIANTS = ("base", "postgres", "kafka")

Manifest = dict[str, Any]


@pytest.fixture(scope="session")
def kubectl() -> str:
    try:
        return find_program("kubectl", debian_package="kubernetes-client")
    except NotAvailable as error:
        pytest.fail(str(error))


def rendered(kubectl: str, variant: str) -> list[Manifest]:
    """All manifests of a variant, with its patches applied."""
    command = [kubectl, "kustomize", str(DEPLOY / "kubernetes" / variant)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = [each for each in manifests if each["kind"] == kind]
    return found


def silo_container(manifests: list[Manifest]) -> Manifest:
    (container,) = of_kind(manifests, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    return container


def silo_file(manifests: list[Manifest]) -> str:
    return of_kind(manifests, "ConfigMap")["data"]["silo.toml"]


def unit(name: str) -> dict[str, str]:
    """The settings of a unit of systemd."""
    text = (DEPLOY / "systemd" / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def health_check() -> list[str]:
    """The command of the container's health check."""
    found = re.search(r"HEALTHCHECK.*?CMD (\[.*?\])$", DOCKERFILE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found
    return json.loads(found[1])


def container_variables() -> dict[str, str]:
    """The variables that the image sets."""
    text = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", "")
    return dict(re.findall(r"(HEADRACE_\w+)=(\S+)", text))


def free_ports(count: int) -> list[int]:
    """Ports that the system hands out at random, so that tests in other processes get others."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def moved(text: str, **places: str | int) -> str:
    """A file with other paths and ports: `moved(text, **{"9464": 1234})`."""
    for old, new in places.items():
        assert old in text, old
        text = text.replace(old, str(new))
    return text
