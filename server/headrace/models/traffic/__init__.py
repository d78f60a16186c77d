"""Traffic over the versions of a model: canary shares, sticky requests, shadow requests, promotion rules."""
