"""Offline tuning of cunorm: the workloads. The library never imports this package; the tuner is not in this version."""
