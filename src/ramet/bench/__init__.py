"""Measurements: a workload, the run that times it, the floor it is compared with, and the report."""
