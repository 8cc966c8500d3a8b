"""The gRPC and HTTP servers of a silo: calls, access control and limits. Nothing in this package knows a provider."""

from ..client import grpc_process as grpc_process  # sets variables that grpc reads when it is imported
