"""The operator lab: measures convolution algorithms, layer by layer, against cuDNN and TensorRT."""
