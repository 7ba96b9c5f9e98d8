"""Shared by all tests: one CPU thread, since tests may run beside each other and small models gain nothing from more."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
