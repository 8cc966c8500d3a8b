from tests.cli.conftest import headrace, postgres_server, postgres_url, redis_server, start

__all__ = ("headrace", "postgres_server", "postgres_url", "redis_server", "start")
