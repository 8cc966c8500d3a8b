"""Settings of the client, and secrets, which appear nowhere."""

import re
from pathlib import Path

import pytest

from headrace.adapters.kafka.client import KafkaClients
from headrace.adapters.kafka.options import KafkaOptions, with_location
from headrace.adapters.kafka.secrets import ClientSettings, SecretPlace
from headrace.adapters.registry import read_options
from headrace.streams.errors import InvalidArgument

SECRET = "hunter-2"


@pytest.mark.parametrize(
    "name",
    [
        "acks",
        "auto.offset.reset",
        "batch.size",
        "bootstrap.servers",
        "enable.auto.commit",
        "error_cb",
        "fetch.error.backoff.ms",
        "group.id",
        "queued.max.messages.kbytes",
        "queued.min.messages",
    ],
)
def test_settings_that_belong_to_headrace_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"kafka.{name} is set by headrace"):
        ClientSettings({name: "x"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bootstrap": " "}, "bootstrap is empty: write the addresses"),
        ({"topic": ""}, "topic = '' cannot be the name of a topic"),
        ({"topic": "bad topic!"}, "topic = 'bad topic!' cannot be the name of a topic"),
        ({"topic": "x" * 240}, "write 1 to 239 letters"),
        ({"partitioner": "murmur2"}, "partitioner is an option of raw topics: set format = 'raw'"),
        ({"namespace": "orders"}, "namespace is an option of raw topics: set format = 'raw'"),
        ({"compression": "zip"}, 'compression = "zip": expected "gzip", "lz4"'),
    ],
)
def test_options_that_would_be_ignored_or_fail_later_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        read_options("kafka", KafkaOptions, {"bootstrap": "h:1", **options})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sasl.jaas.config", "setting of the Java client"),
        ("no.such.name", 'No such configuration property: "no.such.name"'),
    ],
)
def test_unknown_settings_are_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        KafkaClients(KafkaOptions(bootstrap="localhost:1"), ClientSettings({name: SECRET})).admin()


def test_secrets_come_from_files_and_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    monkeypatch.setenv("SECRET", SECRET)
    places = {
        "sasl.password": SecretPlace(file=str(tmp_path / "secret")),
        "ssl.key.password": SecretPlace(env="SECRET"),
    }
    assert ClientSettings(places).values() == dict.fromkeys(places, SECRET)


@pytest.mark.parametrize("place", [SecretPlace(), SecretPlace(env="NOT_SET"), SecretPlace(file="/not/there")])
def test_places_without_a_secret_are_refused(place: SecretPlace) -> None:
    with pytest.raises(InvalidArgument, match=r"kafka\.sasl\.password"):
        ClientSettings({"sasl.password": place})


def test_file_of_a_secret_that_is_no_text_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match=r"kafka\.sasl\.password: the file .*secret is not text in UTF-8"):
        ClientSettings({"sasl.password": SecretPlace(file=str(tmp_path / "secret"))})


def test_value_from_a_secret_place_is_masked_whatever_its_setting_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    settings = ClientSettings({"sasl.username": SecretPlace(env="SECRET")})
    assert SECRET not in repr(settings) + settings.without_secrets(f"user {SECRET} is unknown")


@pytest.mark.parametrize(
    "name",
    [
        "sasl.password",
        "ssl.key.pem",
        "ssl.key.password",
        "ssl.keystore.password",
        "sasl.jaas.config",
        "sasl.kerberos.kinit.cmd",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.client.credentials.client.secret",
        "sasl.oauthbearer.config",
        "sasl.oauthbearer.assertion.private.key.pem",
        "sasl.oauthbearer.assertion.private.key.passphrase",
    ],
)
def test_secrets_appear_in_no_text_and_are_not_stored(name: str) -> None:
    kafka = {"sasl.username": "me", name: SECRET}
    options = read_options("kafka", KafkaOptions, {"bootstrap": "h:1", "kafka": kafka})
    settings = ClientSettings(options.kafka)
    assert SECRET not in repr(options) + repr(settings) + str(options.location("t", "id"))
    assert settings.without_secrets(f"the password {SECRET} is wrong") == "the password *** is wrong"
    assert options.location("t", "id")["kafka"] == {"sasl.username": "me"}


def test_other_addresses_keep_the_stored_settings_of_the_client() -> None:
    """Else a client would connect without TLS after the brokers have moved, and the settings would be lost."""
    given = {"bootstrap": "h:1", "kafka": {"security.protocol": "SASL_SSL"}}
    stored = read_options("kafka", KafkaOptions, given).location("t", "id")
    assert with_location("default", {"bootstrap": "h:2"}, stored)[0]["kafka"] == given["kafka"]
    assert with_location("default", {"bootstrap": "h:2", "kafka": {}}, stored)[0]["kafka"] == {}


def test_age_that_headrace_deletes_by_is_stored() -> None:
    given = {"bootstrap": "h:1", "retain_age_s": 60.0}
    stored = read_options("kafka", KafkaOptions, given).location("t", "id")
    assert with_location("default", {}, stored)[0]["retain_age_s"] == 60.0
    by_kafka = read_options("kafka", KafkaOptions, {**given, "retain_unfinished": False})
    assert "retain_age_s" not in by_kafka.location("t", "id")


def test_stored_place_of_a_secret_is_used_again() -> None:
    given = {"bootstrap": "h:1", "kafka": {"sasl.password": {"env": "SECRET"}}}
    stored = read_options("kafka", KafkaOptions, given).location("t", "id")
    located, topic_id = with_location("default", {}, stored)
    assert topic_id == "id"
    assert read_options("kafka", KafkaOptions, located).kafka == {"sasl.password": SecretPlace(env="SECRET")}
