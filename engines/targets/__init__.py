"""What engines are built for: ONNX Runtime on a CPU, TensorRT on an NVIDIA GPU."""
