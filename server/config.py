"""Configuration of a silo's servers: addresses, certificates and limits."""

from __future__ import annotations

import errno
import ipaddress
import ssl
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from ..streams.errors import InvalidArgument
from .limits import ClientLimits

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address of /metrics, /healthz and the dashboard. `silo.config.check` refuses wrong combinations."""

    host: str = "127.0.0.1"
    """Address of this machine that the HTTP server listens at."""
    port: Port | None = None
    """None: not served. 0: a free port, which is logged."""
    certificate: str | None = None
    """File: the certificate of the HTTP server and its chain, PEM. None: no TLS."""
    key: str | None = None
    """File: the certificate's key, PEM, without a passphrase."""
    dashboard: bool | None = None
    """Serve the dashboard. None: on loopback, and with TLS."""
    insecure: bool = False
    """Serve the dashboard without TLS even if other machines can reach the address."""
    auth: Literal["tokens", "none"] | None = None
    """Whether the dashboard shows anything without a token. None: "none" on loopback, if gRPC needs no tokens and no
    client certificates there; else "tokens"."""

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def serves_dashboard(self) -> bool:
        if self.port is None:
            return False
        return self.loopback or self.certificate is not None if self.dashboard is None else self.dashboard


NO_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors for an address that this machine does not have, as ::1 in a container without IPv6."""


class GrpcConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address of gRPC, its access control and limits. `silo.config.check` refuses wrong combinations."""

    host: str = "127.0.0.1"
    """Address of this machine that gRPC listens at. Other than loopback, it needs TLS or `insecure`."""
    port: Port | None = None
    """None: not served. 0: a free port, which is logged."""
    native: bool = True
    """Serve the native protocol of Python clients as well. They learn its port over gRPC."""
    native_port: Port = 0
    """The port of the native protocol. 0: a free port."""
    insecure: bool = False
    """Serve without TLS even if other machines can reach the address."""
    certificate: str | None = None
    """File: the silo's certificate and its chain, PEM."""
    key: str | None = None
    """File: the certificate's key, PEM, without a passphrase."""
    client_ca: str | None = None
    """File: CA certificates, PEM. Clients need a certificate that one of them signed."""
    auth: Literal["tokens", "none"] | None = None
    """None: "none" if clients need a certificate, on loopback, and with `insecure`; else "tokens"."""
    session_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Silence after which a consumer's events go to other consumers, in seconds."""
    limits: ClientLimits = ClientLimits()

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def asks_for_tokens(self) -> bool:
        if self.auth is not None:
            return self.auth == "tokens"
        return not (self.loopback or self.insecure or self.client_ca is not None)

    def at(self, port: int) -> str:
        """Return the address with this port, as in 127.0.0.1:9465 and [::1]:9465."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. Of all names, only localhost counts as such."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class TlsCredentials(NamedTuple):
    """Certificates and key for TLS, PEM."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    """Clients need a certificate that one of these signed. None: they need no certificate."""


def read_credentials(grpc: GrpcConfig) -> TlsCredentials | None:
    """Read the files that the options name. Return None without TLS.

    Raises InvalidArgument with the option and the file if one cannot be read or used.
    """
    if grpc.certificate is None or grpc.key is None:
        return None
    certificate, key = _pem("grpc.certificate", grpc.certificate), _pem("grpc.key", grpc.key)
    client_ca = None if grpc.client_ca is None else _pem("grpc.client_ca", grpc.client_ca)
    _check_loading("grpc", grpc.certificate, grpc.key, grpc.client_ca)
    return TlsCredentials(certificate, key, client_ca)


def _pem(option: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{option}: {file} cannot be read: {error.strerror or error}") from None


def check_usable(section: str, certificate: str, key: str) -> None:
    """Raise InvalidArgument, with the option of a section and the file, if a certificate or its key cannot be used."""
    _pem(f"{section}.certificate", certificate)
    _pem(f"{section}.key", key)
    _check_loading(section, certificate, key, None)


def _check_loading(section: str, certificate: str, key: str, client_ca: str | None) -> None:
    """Let OpenSSL check the files: gRPC accepts any bytes, and then fails at each connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        why = (
            "they do not belong together"
            if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"
            else f"these are no certificate and key in PEM, the key without a passphrase ({error})"
        )
        raise InvalidArgument(f"{section}.certificate {certificate}, {section}.key {key}: {why}") from None
    try:
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(f"{section}.client_ca: {client_ca} has no certificate in PEM ({error})") from None
