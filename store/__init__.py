"""The control store: one SQLAlchemy Core schema for SQLite and PostgreSQL. And the data directory that holds it."""
