"""What needs the CUDA driver. Nothing here is imported on a machine without a GPU."""
