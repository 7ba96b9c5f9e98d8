"""Sampling: a token's noise is a hash of (seed, sample id, position, token), so a sample depends on nothing else."""
