"""A thin client of the Open Inference Protocol V2 over HTTP, for Headrace's own command line."""
