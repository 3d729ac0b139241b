"""Tests of benchmarks/simulator."""
