"""Where a provider is, as Spark's options say: a data directory that this process can reach, or silos."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..silo.datadir import check_provider_name
from ..streams.errors import HeadraceError, InvalidArgument, error_of

if TYPE_CHECKING:
    from ..streams.client.connection import Connection
    from .access import QueueAccess

OPTIONS = ("data", "server", "provider", "token", "tls", "tlsCa", "tlsCertificate", "tlsKey", "insecure")
_OF_SERVER = OPTIONS[3:]
CONNECT_S = 15.0
"""How long opening tries to reach a silo."""
_AS_OPTIONS = {
    "tls.certificate": "option 'tlsCertificate'",
    "tls.ca": "option 'tlsCa'",
    "tls.key": "option 'tlsKey'",
    "a client certificate and its key": "options 'tlsCertificate' and 'tlsKey'",
    "give tls=Tls(...), or insecure=True": "give the option 'tlsCa' or 'tls', or 'insecure'",
    "leave tls out": "leave the options 'tls' and 'tlsCa' out",
    "send the metadata `authorization: Bearer hr_...`, with a token": "give the option 'token', one",
    "the token ": "option 'token': the token ",
}
"""What a client says, and what that is in options."""


class Tls(NamedTuple):
    """Files, which have to be there where they are used; without any, well-known authorities are trusted."""

    ca: str | None
    certificate: str | None
    key: str | None


class Place(NamedTuple):
    """A provider, and how to come to it. Travels between processes."""

    data: str | None
    server: str | None
    provider: str = "default"
    token: str | None = None
    tls: Tls | None = None
    """None: without TLS."""
    insecure: bool = False
    delays: str | None = None
    """Of the provider on a data directory, for who publishes: where delayed events wait."""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Place:
        """From options, in any case, of which others may be there too. Raises InvalidArgument with a line that names
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
        return f"Place({self.data or self.server!r}, {self.provider!r})"

    def connection(self) -> Connection:
        """To the silos of `server`; not open yet. Raises InvalidArgument."""
        from ..streams.client.connection import Connection  # noqa: PLC0415 (it loads grpc)
        from ..streams.client.connection import Tls as ClientTls  # noqa: PLC0415

        assert self.server is not None
        with as_options("server"):
            tls = None if self.tls is None else ClientTls(**self.tls._asdict())
            return Connection(self.server, token=self.token, tls=tls, insecure=self.insecure)

    def open(self) -> QueueAccess:
        """What reads it: opened once in a process, and left open as long as that lives, unless the provider is deleted.
        Whoever uses it does not close it. Raises what opening raises: see LogAccess and RemoteAccess."""
        with _opening:
            key = (os.getpid(), self)  # what a parent process has opened is not the child's
            if key in _opened and not _opened[key].is_current():
                _opened.pop(key).close()
            if key not in _opened:
                _opened[key] = self._open()
            return _opened[key]

    def _open(self) -> QueueAccess:
        if self.data is not None:
            from .access import LogAccess  # noqa: PLC0415 (who writes needs neither)

            return LogAccess(self.data, self.provider)
        from .remote import RemoteAccess  # noqa: PLC0415

        connection = self.connection()
        with as_options():
            return RemoteAccess(connection, self.provider, connect_s=CONNECT_S)


@contextmanager
def as_options(name: str = "") -> Generator[None]:
    """Errors of a client name options instead of arguments; what names none is said of the option `name`."""
    try:
        yield
    except HeadraceError as error:
        text = str(error)
        for argument, option in _AS_OPTIONS.items():
            text = text.replace(argument, option)
        if name and "option" not in text:
            text = f"option {name!r}: {text}"
        raise error_of(error.code, text) or error from None


def flag(name: str, value: str) -> bool:
    """An option that is true or false. Raises InvalidArgument."""
    if value.lower() not in ("true", "false"):
        raise InvalidArgument(f"option {name!r} is true or false, not {value!r}")
    return value.lower() == "true"


def _data(options: Mapping[str, str]) -> str | None:
    data = options.get("data")
    if data is None:
        return None
    if "://" in data:  # not repeated: it may hold a password
        raise InvalidArgument("option 'data' is a directory, not a URL: where executors cannot reach it, give 'server'")
    return str(Path(data).absolute())


def _provider(name: str) -> str:
    try:
        return check_provider_name(name)
    except InvalidArgument as error:
        raise InvalidArgument(f"option 'provider': {error}") from None


def _tls(options: Mapping[str, str]) -> Tls | None:
    files = Tls(*(options.get(name) for name in ("tlsca", "tlscertificate", "tlskey")))
    wanted = flag("tls", options.get("tls", "true" if any(files) else "false"))
    if not wanted and any(files):
        raise InvalidArgument("option 'tls' is false, and others name files for it: leave one or the other out")
    return files if wanted else None


_opened: dict[tuple[int, Place], QueueAccess] = {}
_opening = threading.Lock()


def _forget_the_lock() -> None:
    """Another thread of the parent process may have held it when this process was forked."""
    global _opening  # noqa: PLW0603
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_forget_the_lock)
