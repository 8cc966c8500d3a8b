"""The place of a provider: options are checked when they are given, and each process opens a place once."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace import InvalidArgument, StreamId, Unavailable
from headrace.pipeline.access import LogAccess
from headrace.pipeline.place import OPTIONS, ProviderPlace
from headrace.pipeline.remote import RemoteAccess
from headrace.silo.provider import Provider
from tests.certificates import Authority
from tests.client.silos import SiloProcess

TOKEN = "hr_secret"


def test_options_in_any_case_make_a_place():
    place = ProviderPlace.of(
        {"Server": "a:1,b:2", "PROVIDER": "p", "token": TOKEN, "tlsca": "ca.pem", "namespace": "n"}
    )
    assert place.server == "a:1,b:2"
    assert (place.data, place.provider, place.token, place.insecure) == (None, "p", TOKEN, False)
    assert place.tls is not None
    assert place.tls.ca == "ca.pem"
    assert ProviderPlace.of({"server": "a:1", "tls": "TRUE"}).tls == (None, None, None)
    assert ProviderPlace.of({"server": "a:1"}).tls is None
    assert all(name in OPTIONS for name in ("data", "server", "provider", "tlsCertificate"))


def test_a_place_travels_and_does_not_show_its_token():
    place = ProviderPlace.of({"server": "127.0.0.1:1", "token": TOKEN})
    assert pickle.loads(pickle.dumps(place)) == place
    assert TOKEN not in f"{place} {place!r}"


def test_a_directory_is_the_same_wherever_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert ProviderPlace.of({"data": "d"}).data == str(tmp_path / "d")


WRONG: Mapping[str, tuple[Mapping[str, str], str]] = {
    "neither": ({}, "option 'data' or 'server': give one of them"),
    "both": ({"data": "d", "server": "a:1"}, "option 'data' or 'server': give one of them"),
    "a URL": ({"data": "s3://user:secret@host/x"}, "option 'data' is a directory, not a URL"),
    "a token for data": ({"data": "d", "token": TOKEN}, "option 'token' is for 'server', not for 'data'"),
    "TLS for data": ({"data": "d", "tlsCA": "f"}, "option 'tlsCa' is for 'server', not for 'data'"),
    "no address": ({"server": "nowhere"}, "option 'server': 'nowhere' is no address: write it as host:port"),
    "a bad provider": ({"data": "d", "provider": "../x"}, "option 'provider': '../x' is not a provider name"),
    "an empty token": (
        {"server": "a:1", "token": "", "tls": "true"},
        "option 'token': the token is empty, or has characters",
    ),
    "a token in the open": (
        {"server": "a:1", "token": TOKEN},
        "use option 'tlsCa' or 'tls', or option 'insecure' in",
    ),
    "half a certificate": (
        {"server": "a:1", "tlsKey": "f"},
        "option 'tlsCertificate': a client certificate and its key go together: give both, or neither",
    ),
    "a bad flag": ({"server": "a:1", "insecure": "yes"}, "option 'insecure' is true or false, not 'yes'"),
    "TLS that is not": ({"server": "a:1", "tls": "false", "tlsCa": "f"}, "option 'tls' is false, and others name"),
}


@pytest.mark.parametrize(("given", "text"), WRONG.values(), ids=WRONG)
def test_error_names_the_option(given: Mapping[str, str], text: str):
    with pytest.raises(InvalidArgument) as caught:
        ProviderPlace.of(given)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


async def publish(data: Path) -> None:
    async with Provider.open(data, queues=2) as provider:
        await provider.publish(StreamId("n", "k"), [b"1", b"2"])


def test_a_data_directory_is_opened_once_in_each_process(tmp_path: Path):
    asyncio.run(publish(tmp_path))
    place = ProviderPlace.of({"data": str(tmp_path)})
    access = place.open()
    assert isinstance(access, LogAccess)
    assert access is pickle.loads(pickle.dumps(place)).open()
    assert sum(state.events or 0 for state in access.states()) == 2
    access.close()


FORKED = """
import os, sys
from headrace.pipeline.place import ProviderPlace
from headrace import NotSupported
place = ProviderPlace.of({"data": sys.argv[1]})
access = place.open()
if not (child := os.fork()):
    try:
        place.open()
    except NotSupported as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
access.close()
"""


def test_a_forked_process_opens_it_anew(tmp_path: Path):
    """What its parent has opened is not used; LMDB refuses to open it a second time."""
    asyncio.run(publish(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", FORKED, tmp_path], check=False, capture_output=True, timeout=60, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "was opened before this process was forked" in done.stdout


def test_silos_are_opened_with_token_and_tls(tmp_path: Path):
    authority = Authority(tmp_path)
    files = authority.issue("127.0.0.1")
    flags = ("--certificate", str(files.certificate), "--key", str(files.key))
    silo = SiloProcess(tmp_path, *flags)
    silo.start()
    try:
        place = ProviderPlace.of({"server": silo.address, "tlsCa": str(authority.certificate)})
        access = place.open()
        assert isinstance(access, RemoteAccess)
        assert access is place.open()
        assert len(access.states()) == access.queues
        access.close()
        missing = ProviderPlace.of({"server": silo.address, "tlsCa": str(tmp_path / "missing.pem")})
        with pytest.raises(InvalidArgument, match=r"^option 'tlsCa': .*missing.pem: No such file"):
            missing.open()
    finally:
        silo.stop()


def test_closed_port_is_reported_and_tried_again_the_next_time():
    place = ProviderPlace.of({"server": "127.0.0.1:1"})
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"no silo answers at 127\.0\.0\.1:1"):
            place.open(connect_s=0.2)
