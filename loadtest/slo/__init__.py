"""Value of latency objectives under overload: `python -m loadtest.slo`."""
