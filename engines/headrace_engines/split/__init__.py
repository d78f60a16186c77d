"""Cuts an ONNX model into parts that run one after the other, each on its own GPU."""
