"""The data plane in virtual time: arrivals replayed against policies and latency profiles, without threads, models or waiting."""
