"""The nouns: no I/O, no threads, no protocol."""
