"""The provider, and the silo process that serves it."""
