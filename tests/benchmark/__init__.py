"""The benchmark: `python -m tests.benchmark`."""
