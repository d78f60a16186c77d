"""The soak: mixed load over both protocols for minutes, while models are reloaded, clients leave and misbehave, and an instance's
process is killed; then judged: nothing lost, nothing wrong, memory and descriptors flat, p99 stable.

    python -m loadtest.soak --seconds 600        what `make soak` runs

The load comes in phases. After each all clients have gone, and the quiet server is measured: what it holds then it must hold
after the next one, too. The first phase is the warm-up; the others are compared with its end.
"""
