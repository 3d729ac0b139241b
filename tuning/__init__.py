"""Offline tuning and benchmarks of cunorm. The normalisation functions never import this package."""
