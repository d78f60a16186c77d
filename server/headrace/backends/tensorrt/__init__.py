"""TensorRT engines."""
