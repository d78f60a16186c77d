"""Protocols: HTTP and gRPC from the socket to a request, and what both share."""
