from tests.cli.conftest import headrace, start
from tests.deploy.manifests import kubectl

__all__ = ("headrace", "kubectl", "start")
