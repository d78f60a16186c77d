"""GPU access: the CUDA driver, memory, kernels, TensorRT and NVML; the only package that imports PyCUDA."""
