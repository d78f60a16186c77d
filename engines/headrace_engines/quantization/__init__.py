"""INT8 and FP8: the samples, the ranges found on them, and the graph written with them."""
