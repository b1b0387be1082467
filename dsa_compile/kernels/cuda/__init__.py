"""Kernels in CUDA C++, compiled at run time by NVRTC: no nvcc, no build step."""
