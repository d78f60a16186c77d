"""INT8 and FP8: samples, calibrated ranges, and the graph with Q/DQ pairs."""
