"""gRPC front end: codec, methods of all services, and the server."""
