"""A silo as a server to measure and to test: `headrace silo` in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .servers import Server


class SiloServer(Server):
    """`headrace silo` with gRPC on `address`, and its data in the folder `data`; `arguments` are added.

    Without `native`, clients use gRPC.
    """

    name = "silo"

    def __init__(self, directory: Path | None = None, *, arguments: Sequence[str] = (), native: bool = True) -> None:
        super().__init__(directory)
        self._native = native
        self._arguments = arguments
        self._logged = 0

    @property
    def data(self) -> str:
        return str(self.directory / "data")

    def command(self) -> Sequence[str]:
        script = str(Path(sys.executable).parent / "headrace")
        file = () if self._native else (str(self.directory / "silo.toml"),)
        return (script, "silo", *file, "--data", self.data, "--listen", self.address, *self._arguments)

    def prepare(self) -> None:
        self._logged = len(self.log())
        if not self._native:
            (self.directory / "silo.toml").write_text("[grpc]\nnative = false\n")

    def ping(self) -> bool:
        """Whether this start of it has said that it is ready."""
        return "silo is ready" in self.log()[self._logged :]

    def log(self) -> str:
        """What it has logged, over all its starts."""
        file = self.directory / "server.log"
        return file.read_text(errors="replace") if file.exists() else ""
