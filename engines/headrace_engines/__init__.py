"""The builder: quantizes models, builds engines for this machine, compares and publishes them."""
