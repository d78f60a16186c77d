"""Queue, batching, instances: what happens between a decoded request and its answer."""
