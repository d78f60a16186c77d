"""Bytes to requests and answers to bytes; thin, and all on one data plane."""
