"""The control store (one SQLAlchemy Core schema for SQLite and PostgreSQL), and the data directory."""
