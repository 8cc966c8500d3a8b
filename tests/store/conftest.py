from ..servers import postgres_server, postgres_url, redis_server

__all__ = ("postgres_server", "postgres_url", "redis_server")
