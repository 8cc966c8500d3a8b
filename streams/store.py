"""The control store: subscriptions, checkpoints, dead letters, gaps, provider records.

One SQLAlchemy Core schema and one implementation for SQLite (embedded) and PostgreSQL (cluster). All methods are
coroutines; the blocking work runs in the store's own thread.
"""
