"""Inference and control of models, independent of the protocol: HTTP and gRPC share it."""
