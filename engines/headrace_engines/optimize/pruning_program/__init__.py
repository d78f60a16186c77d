"""Program on an interpreter with PyTorch: prunes channels, trains the pruned network, exports it to ONNX.

It imports the standard library, NumPy, ONNX, PyTorch and torchvision, and nothing else of this package.
"""
