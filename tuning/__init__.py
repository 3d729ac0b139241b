"""Offline tuning of cunorm: workloads, studies, workers that measure, reports. Calls never import this package."""
