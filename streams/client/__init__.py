"""The client: a provider in another process, over gRPC."""
