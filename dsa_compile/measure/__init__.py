"""Measuring kernels: correctness first, then medians of CUDA graph replays."""
