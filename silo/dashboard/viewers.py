"""The permissions with which pages are read."""

from __future__ import annotations

from typing import NamedTuple

from ...server.access import EVERYTHING, Permission, Principal
from ...streams.errors import PermissionDenied


class Viewer(NamedTuple):
    """The permissions of a request."""

    principal: Principal
    logged_in: bool
    """False: a viewer without a token. It sees all pages without payloads, and can change nothing."""

    @property
    def may_manage(self) -> bool:
        """Whether the viewer may manage any namespace: see payloads, redrive and discard."""
        try:
            self.principal.require_somewhere(Permission.MANAGE)
        except PermissionDenied:
            return False
        return self.logged_in


GUEST = Viewer(Principal("", EVERYTHING.grants), logged_in=False)

OPERATOR = Viewer(EVERYTHING, logged_in=True)
"""A viewer whose permissions are checked by the silo that is asked."""
