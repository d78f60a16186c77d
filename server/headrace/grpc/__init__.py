"""gRPC: codec, service and two engines."""
