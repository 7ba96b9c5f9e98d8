"""Shared by all tests: one CPU thread. Small models gain nothing from more, and tests may run beside each other."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():  # the Triton kernels then run in Triton's interpreter, which is chosen at its import
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
