"""Shared by all tests: one CPU thread. Small models gain nothing from more, and tests may run beside each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
