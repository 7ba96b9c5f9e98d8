"""Kernels of the attention library. Modules here import Triton; whoever wants one imports it when it is needed."""
