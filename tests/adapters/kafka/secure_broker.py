"""A broker with a listener for each way in which clients prove their identity, and the clients' settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from benchmarks.kafka_servers import KafkaServer
from tests.certificates import Authority, Files

PASSWORD = "correct-horse-battery"
LISTENERS = {"TLS": "SSL", "MUTUAL": "SSL", "PLAIN": "SASL_SSL", "TOKEN": "SASL_SSL", "SCRAM": "SASL_SSL"}
_LOGIN = "org.apache.kafka.common.security"


class SecureBroker:
    """A broker, and the authority that signed its certificate. All users have the name `reader`."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.client = self.authority.issue("reader.example", common_name="reader")
        self._folder = folder
        self.server = KafkaServer(
            users={"reader": PASSWORD},
            listeners=LISTENERS,
            settings={
                **_tls("", self.authority, self.authority.issue("127.0.0.1"), folder),
                "listener.name.mutual.ssl.client.auth": "required",
                **_sasl("plain", "PLAIN", f'{_LOGIN}.plain.PlainLoginModule required user_reader="{PASSWORD}";'),
                **_sasl(
                    "token",
                    "OAUTHBEARER",
                    f'{_LOGIN}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="reader";',
                ),
                **_sasl("scram", "SCRAM-SHA-512", f"{_LOGIN}.scram.ScramLoginModule required;"),
            },
        )

    def bootstrap(self, listener: str) -> str:
        return self.server.address_of(listener)

    def tls(self) -> dict[str, str]:
        """Settings of a client that trusts the authority."""
        return {"security.protocol": "SSL", "ssl.ca.location": str(self.authority.certificate)}

    def mutual(self) -> dict[str, str]:
        """Settings of a client that has a certificate."""
        return {
            **self.tls(),
            "ssl.certificate.location": str(self.client.certificate),
            "ssl.key.location": str(self.client.key),
        }

    def password(self, mechanism: str, password: str = PASSWORD) -> dict[str, str]:
        """Settings of a client that has a password."""
        login = {"sasl.mechanism": mechanism, "sasl.username": "reader", "sasl.password": password}
        return {**self.tls(), "security.protocol": "SASL_SSL", **login}

    def token(self) -> dict[str, str | bool]:
        """Settings of a client that makes its own token, without a signature."""
        return {
            **self.tls(),
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "OAUTHBEARER",
            "enable.sasl.oauthbearer.unsecure.jwt": True,
            "sasl.oauthbearer.config": "principal=reader",
        }


def _tls(prefix: str, authority: Authority, files: Files, folder: Path) -> Mapping[str, str]:
    """Settings of listeners with a certificate. Kafka wants the key as PKCS #8, in one file with the certificate."""
    key = load_pem_private_key(files.key.read_bytes(), None)
    store = folder / "broker.pem"
    encoded = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    store.write_bytes(encoded + files.certificate.read_bytes())
    return {
        f"{prefix}ssl.keystore.type": "PEM",
        f"{prefix}ssl.keystore.location": str(store),
        f"{prefix}ssl.truststore.type": "PEM",
        f"{prefix}ssl.truststore.location": str(authority.certificate),
    }


def _sasl(listener: str, mechanism: str, login: str) -> Mapping[str, str]:
    return {
        f"listener.name.{listener}.sasl.enabled.mechanisms": mechanism,
        f"listener.name.{listener}.{mechanism.lower()}.sasl.jaas.config": login,
    }
