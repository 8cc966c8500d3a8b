"""Where a provider is, as Spark's options say: a data directory that this process can reach, or silos."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..silo.datadir import check_provider_name
from ..streams.errors import InvalidArgument

if TYPE_CHECKING:
    from .access import QueueAccess

OPTIONS = ("data", "server", "provider", "token", "tls", "tlsCa", "tlsCertificate", "tlsKey", "insecure")
_OF_SERVER = OPTIONS[3:]


class Place(NamedTuple):
    """A provider, and how to come to it. Travels between processes."""

    data: str | None
    server: str | None
    provider: str = "default"
    token: str | None = None
    tls: tuple[str | None, str | None, str | None] | None = None
    """Files of the authorities' certificates, of the own certificate, and of its key; None: without TLS."""
    insecure: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Place:
        """From options, of which others may be there too. Raises InvalidArgument with a line that names the option."""
        options = {name.lower(): value for name, value in given.items()}
        data, server = options.get("data"), options.get("server")
        if (data is None) == (server is None):
            raise InvalidArgument(
                "option 'data' or 'server': give one of them, a data directory or the address of a silo"
            )
        if wrong := next((name for name in _OF_SERVER if data is not None and name.lower() in options), None):
            raise InvalidArgument(f"option {wrong!r} is for 'server', not for 'data'")
        if data is not None and "://" in data:
            raise InvalidArgument("option 'data' is a directory, not a URL: for one elsewhere, give 'server'")
        try:
            provider = check_provider_name(options.get("provider", "default"))
        except InvalidArgument as error:
            raise InvalidArgument(f"option 'provider': {error}") from None
        files = (options.get("tlsca"), options.get("tlscertificate"), options.get("tlskey"))
        tls = files if any(files) or flag("tls", options.get("tls", "false")) else None
        insecure = flag("insecure", options.get("insecure", "false"))
        return cls(data and str(Path(data).absolute()), server, provider, options.get("token"), tls, insecure)

    def __repr__(self) -> str:
        """Without the token."""
        return f"Place({self.data or self.server!r}, {self.provider!r})"

    def open(self) -> QueueAccess:
        """What reads it, opened once in this process. Raises what opening raises."""
        key = (os.getpid(), self)  # what a parent process has opened is not the child's
        if key not in _opened:
            _opened[key] = self._open()
        return _opened[key]

    def _open(self) -> QueueAccess:
        if self.data is not None:
            from .access import LogAccess  # noqa: PLC0415 (who writes needs neither)

            return LogAccess(self.data, self.provider)
        from .remote import RemoteAccess  # noqa: PLC0415

        return RemoteAccess(self)


def flag(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise InvalidArgument(f"option {name!r} is true or false, not {value!r}")
    return value.lower() == "true"


_opened: dict[tuple[int, Place], QueueAccess] = {}
