"""gRPC front end: codec, methods of all services, and two engines."""
