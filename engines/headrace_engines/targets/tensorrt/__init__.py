"""TensorRT on an NVIDIA GPU: builds and runs plans from ONNX models."""
