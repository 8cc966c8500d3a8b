"""Certificates for TLS in tests: made anew, and trusted by no other program."""

from pathlib import Path
from typing import NamedTuple

import trustme


class Files(NamedTuple):
    """A certificate and its key, in files as a program gets them."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; `certificate` is the file to trust."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._authority = trustme.CA()
        self._folder = folder
        self.certificate = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(str(self.certificate))

    def issue(self, *names: str, common_name: str | None = None) -> Files:
        """A certificate for these names and addresses, as in issue("localhost", "127.0.0.1")."""
        issued = self._authority.issue_cert(*names, common_name=common_name)
        stem = (common_name or names[0]).replace(" ", "-")
        files = Files(self._folder / f"{stem}.pem", self._folder / f"{stem}.key")
        for file in files:
            file.unlink(missing_ok=True)
        for blob in issued.cert_chain_pems:
            blob.write_to_path(str(files.certificate), append=True)
        issued.private_key_pem.write_to_path(str(files.key))
        return files
