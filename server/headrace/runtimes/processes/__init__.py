"""Processes that run models: their start, messages, output, end and restart."""
