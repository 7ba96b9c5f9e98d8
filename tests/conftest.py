"""Shared by all tests: one CPU thread (small models gain nothing from more); no test leaves the logger changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # the Triton kernels then run in Triton's interpreter, which is chosen at its import
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """A command called in this process sets up the program's logger; later tests' ``caplog`` would see nothing."""
    logger = logging.getLogger("ramet")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.handlers[:] = before[1:]
