"""Settings of the client: names that belong to the adapter, and secrets, which never appear in messages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ...streams.errors import InvalidArgument

MASK = "***"
OWNED = frozenset(
    {
        "acks",
        "allow.auto.create.topics",
        "api.version.request",
        "auto.commit.enable",
        "auto.offset.reset",
        "batch.size",
        "bootstrap.servers",
        "check.crcs",
        "compression.codec",
        "compression.type",
        "delivery.timeout.ms",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.gapless.guarantee",
        "enable.idempotence",
        "enable.partition.eof",
        "error_cb",
        "fetch.error.backoff.ms",
        "fetch.message.max.bytes",
        "fetch.queue.backoff.ms",
        "group.id",
        "group.instance.id",
        "group.protocol",
        "isolation.level",
        "linger.ms",
        "logger",
        "max.partition.fetch.bytes",
        "message.max.bytes",
        "message.send.max.retries",
        "message.timeout.ms",
        "metadata.broker.list",
        "on_commit",
        "partition.assignment.strategy",
        "partitioner",
        "queue.buffering.max.kbytes",
        "queue.buffering.max.messages",
        "queue.buffering.max.ms",
        "queued.max.messages.kbytes",
        "queued.min.messages",
        "receive.message.max.bytes",
        "request.required.acks",
        "retries",
        "test.mock.num.brokers",
        "transactional.id",
    }
)
"""Settings that the adapter chooses. Another value could lose events or stop a reader, could deliver records of a topic
that was created again, or would be ignored."""
_SECRET_PARTS = (
    "password",
    "passphrase",
    "secret",
    ".pem",
    "sasl.oauthbearer.config",
    "sasl.jaas.config",
    "sasl.kerberos.kinit.cmd",
)
"""Parts of the names of settings that may have a secret value. Names that end with `.file`, `.location` or `.keytab`
are paths."""


class SecretPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The location of a secret: a file, or an environment variable."""

    file: str | None = None
    env: str | None = None


ClientValue = str | int | float | bool | SecretPlace


def is_secret(name: str) -> bool:
    """Return whether a setting of this name may have a secret value."""
    return any(part in name for part in _SECRET_PARTS)


def masked(settings: Mapping[str, ClientValue]) -> Mapping[str, ClientValue]:
    """Return the settings without secrets."""
    return {
        name: MASK if is_secret(name) and not isinstance(value, SecretPlace) else value
        for name, value in settings.items()
    }


class ClientSettings:
    """Settings of the client, with its secrets. Its `repr` has no secret."""

    def __init__(self, given: Mapping[str, ClientValue]) -> None:
        """Read the secrets; this may block. Raises InvalidArgument for a setting that belongs to the adapter, and for a
        secret that cannot be read."""
        for name in given:
            if name in OWNED:
                raise _refused(f"kafka.{name} is set by headrace: leave it out")
        self._values = {name: _value(name, value) for name, value in given.items()}
        self._secrets = [
            str(value)
            for name, value in self._values.items()
            if (is_secret(name) or isinstance(given[name], SecretPlace)) and str(value)
        ]

    def __repr__(self) -> str:
        return self.without_secrets(f"ClientSettings({dict(masked(self._values))})")

    def values(self) -> dict[str, str | int | float | bool]:
        """Return all settings, with secrets."""
        return dict(self._values)

    def without_secrets(self, text: str) -> str:
        """Return a message of the client with each secret in it masked."""
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return text


def check_names(names: Iterable[str]) -> None:
    """Raise InvalidArgument for names of Java's client, with the name to use."""
    for name in names:
        if name.startswith(("ssl.truststore", "ssl.keystore.type")) or name == "sasl.jaas.config":
            raise _refused(
                f"kafka.{name} is a setting of the Java client: librdkafka has ssl.ca.location, "
                "ssl.certificate.location, ssl.key.location, sasl.username and sasl.password"
            )


def _value(name: str, value: ClientValue) -> str | int | float | bool:
    if not isinstance(value, SecretPlace):
        return value
    if (value.file is None) == (value.env is None):
        raise _refused(f"kafka.{name}: write {{ file = 'PATH' }} or {{ env = 'NAME' }}")
    if value.env is not None:
        if value.env not in os.environ:
            raise _refused(f"kafka.{name}: the environment variable {value.env} is not set")
        return os.environ[value.env]
    assert value.file is not None
    try:
        return Path(value.file).read_text(encoding="utf-8").rstrip("\n")
    except OSError as error:
        raise _refused(f"kafka.{name}: the file {value.file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _refused(f"kafka.{name}: the file {value.file} is not text in UTF-8") from None


def _refused(problem: str) -> InvalidArgument:
    return InvalidArgument(f"adapter 'kafka': {problem}", option="options")
