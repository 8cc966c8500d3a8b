"""Spark reads and writes streams: a source, a sink, and jobs. See docs/spark.md.

The public names are imported when they are first used: they need the extra `headrace[spark]`.
"""
