"""Kernels compiled at run time: CUDA C++ through NVRTC, launched through the driver."""
