"""What both protocols share: requests, options, tensors, load and errors."""
