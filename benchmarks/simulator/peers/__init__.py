"""Kernels of other libraries on the simulator: PyTorch (ATen) and Liger."""
