"""Lower precisions: casts, Q/DQ pairs, and layers in floating point."""
