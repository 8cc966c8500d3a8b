"""The client: a provider in another process, over gRPC."""

from . import grpc_process as grpc_process  # sets variables that grpc reads when it is imported
