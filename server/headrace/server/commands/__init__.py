"""Subcommands of `headrace` that need no server of their own: infer, health, explain, validate, tune and simulate."""
