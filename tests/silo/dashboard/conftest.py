from tests.servers import chromium

__all__ = ["chromium"]
