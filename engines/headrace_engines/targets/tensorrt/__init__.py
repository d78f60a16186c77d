"""TensorRT on an NVIDIA GPU: plans built from ONNX models."""
