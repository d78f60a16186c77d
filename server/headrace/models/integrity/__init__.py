"""Integrity of model files: checksums, signatures of them, and copies that were checked while they were made."""
