"""Notice that a file that is open was deleted or replaced: everything that is written to it would be lost."""

from __future__ import annotations

from pathlib import Path

from .errors import DataDirectoryError, StorageError


class OpenFile:
    """The identity of a file that this process has open."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if there is no file at `path`."""
        self.path = path.absolute()
        self._identity = _identity(self.path)

    def is_current(self) -> bool:
        """Return False if the file was deleted or replaced by another one. Raises StorageError if that is not known."""
        try:
            return _identity(self.path) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise StorageError(f"'{self.path}' cannot be read: {error}") from None

    def check_current(self, shown_as: Path | None = None) -> None:
        """Raise DataDirectoryError if the file was deleted or replaced. The error names `shown_as`; None: the file."""
        if not self.is_current():
            raise DataDirectoryError(
                f"'{shown_as or self.path}' was deleted or replaced while it was open, and nothing more is stored "
                "there: close it, and open it again"
            )


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
