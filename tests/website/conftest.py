"""The documentation site, built once for all tests of this folder."""

from pathlib import Path

import pytest

from tests.servers import chromium
from website.building import build

__all__ = ["chromium"]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the HTML. The build fails if a link of a page leads nowhere."""
    return build(tmp_path_factory.mktemp("web site"))
