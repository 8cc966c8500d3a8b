"""The location of a provider, as Spark's options give it: a data directory that this process can reach, or silos."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..store.datadir import find_data_directory
from ..streams.errors import HeadraceError, InvalidArgument, NotFound
from ..streams.subscriptions import check_provider_name

if TYPE_CHECKING:
    from ..client.connection import GrpcTransport
    from .access import QueueAccess

OPTIONS = ("data", "server", "provider", "token", "tls", "tlsCa", "tlsCertificate", "tlsKey", "insecure")
_OF_SERVER = OPTIONS[3:]
CONNECT_S = 15.0
"""How long opening tries to reach a silo."""
_AS_OPTIONS = {
    "address": "option 'server'",
    "token": "option 'token'",
    "tls": "option 'tlsCa' or 'tls'",
    "tls.ca": "option 'tlsCa'",
    "tls.certificate": "option 'tlsCertificate'",
    "tls.key": "option 'tlsKey'",
    "insecure": "option 'insecure'",
}
"""Arguments of a client, and the options that set them."""


class TlsFiles(NamedTuple):
    """Paths of PEM files, on the machine that connects. Without any, well-known authorities are trusted."""

    ca: str | None
    certificate: str | None
    key: str | None


class ProviderPlace(NamedTuple):
    """A provider and how to reach it. Spark pickles it for other processes."""

    data: str | None
    server: str | None
    provider: str = "default"
    token: str | None = None
    tls: TlsFiles | None = None
    """None: without TLS."""
    insecure: bool = False
    delays: str | None = None
    """For publishing to a data directory: the option `delays` of the provider."""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> ProviderPlace:
        """Read the options of a location; others are ignored, as is the case of names. Raise InvalidArgument that names
        the option."""
        options = {name.lower(): value for name, value in given.items()}
        place = cls(
            data=_data(options),
            server=options.get("server"),
            provider=_provider(options.get("provider", "default")),
            token=options.get("token"),
            tls=_tls(options),
            insecure=flag("insecure", options.get("insecure", "false")),
        )
        place._check(options)
        return place

    def _check(self, options: Mapping[str, str]) -> None:
        if (self.data is None) == (self.server is None):
            raise InvalidArgument(
                "option 'data' or 'server': give one of them, a data directory or the address of a silo"
            )
        if self.server is not None:
            self.connection()
        elif wrong := next((name for name in _OF_SERVER if name.lower() in options), None):
            raise InvalidArgument(f"option {wrong!r} is for 'server', not for 'data'")

    def __repr__(self) -> str:
        """Without the token."""
        return f"ProviderPlace({self.data or self.server!r}, {self.provider!r})"

    def identity(self) -> dict[str, str | None]:
        """Return the values that identify the provider, as jobs store them."""
        where = {"server": self.server} if self.data is None else {"data": str(Path(self.data).resolve())}
        return {**where, "provider": self.provider}

    def connection(self) -> GrpcTransport:
        """Return a connection to the silos of `server` that is not open yet. Raise InvalidArgument."""
        from ..client.connection import GrpcTransport  # noqa: PLC0415 (it loads grpc)
        from ..client.connection import Tls as ClientTls  # noqa: PLC0415

        assert self.server is not None
        with as_options():
            tls = None if self.tls is None else ClientTls(**self.tls._asdict())
            return GrpcTransport(self.server, token=self.token, tls=tls, insecure=self.insecure)

    def open(self, connect_s: float = CONNECT_S) -> QueueAccess:
        """Return the provider's queues for reading. The caller must not close them.

        They are opened once in a process, and stay open until it ends or the provider is deleted. Raise the errors of
        LogAccess and RemoteAccess.
        """
        with _opening:
            key = (os.getpid(), self)  # a child process must not use its parent's
            if key in _opened and not _opened[key].is_current():
                _opened.pop(key).close()
            if key not in _opened:
                _opened[key] = self._open(connect_s)
            return _opened[key]

    def _open(self, connect_s: float) -> QueueAccess:
        if self.data is not None:
            return _of_directory(self.data, self.provider)
        from .remote import RemoteAccess  # noqa: PLC0415

        connection = self.connection()
        with as_options():
            return RemoteAccess(connection, self.provider, connect_s=connect_s)


def _of_directory(data: str, provider: str) -> QueueAccess:
    """Return the queues of a provider by its data directory: its log, or its topic if it is on Kafka."""
    from .access import LogAccess  # noqa: PLC0415 (writing needs neither)

    try:
        return LogAccess(data, provider)
    except NotFound:
        if find_spec("confluent_kafka") is None:
            raise
        from .kafka import KafkaAccess, kafka_location  # noqa: PLC0415

        found = kafka_location(find_data_directory(data), provider)
        if found is None:
            raise
        return KafkaAccess(provider, *found)


@contextmanager
def as_options() -> Generator[None]:
    """Raise the errors of a client with options in their text instead of the client's arguments."""
    try:
        yield
    except HeadraceError as error:
        error.args = (error.text_for(_AS_OPTIONS),)
        raise


def flag(name: str, value: str) -> bool:
    """Read an option that is true or false. Raise InvalidArgument."""
    if value.lower() not in ("true", "false"):
        raise InvalidArgument(f"option {name!r} is true or false, not {value!r}")
    return value.lower() == "true"


def _data(options: Mapping[str, str]) -> str | None:
    data = options.get("data")
    if data is None:
        return None
    if "://" in data:  # not repeated: it may hold a password
        raise InvalidArgument("option 'data' is a directory, not a URL: if executors cannot reach it, give 'server'")
    return str(Path(data).absolute())


def _provider(name: str) -> str:
    try:
        return check_provider_name(name)
    except InvalidArgument as error:
        raise InvalidArgument(f"option 'provider': {error}") from None


def _tls(options: Mapping[str, str]) -> TlsFiles | None:
    files = TlsFiles(*(options.get(name) for name in ("tlsca", "tlscertificate", "tlskey")))
    wanted = flag("tls", options.get("tls", "true" if any(files) else "false"))
    if not wanted and any(files):
        raise InvalidArgument("option 'tls' is false, and others name files for it: leave one or the other out")
    return files if wanted else None


_opened: dict[tuple[int, ProviderPlace], QueueAccess] = {}
_opening = threading.Lock()


def _forget_the_lock() -> None:
    """Another thread of the parent process may have held it when this process was forked."""
    global _opening  # noqa: PLW0603
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_forget_the_lock)
