"""Load on a running Headrace: `python -m loadtest.run` (locust scenarios) and `python -m loadtest.bench` (comparison with peers).

Not part of the distribution: run it from the root of the repository.
"""
