"""Kernels in Triton: one source for Hopper and Blackwell."""
