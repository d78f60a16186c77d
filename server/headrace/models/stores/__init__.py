"""Model repositories in object stores and on the Hugging Face Hub, mirrored into local folders."""
