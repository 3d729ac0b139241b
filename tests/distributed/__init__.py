"""Tests of BatchNorm over several processes."""
