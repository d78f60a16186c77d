"""gRPC: codec, methods of all services, and the server."""
