"""Consumers of one silo that are served by all silos of its cluster."""
