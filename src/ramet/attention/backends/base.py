"""What a backend is."""

from __future__ import annotations

from typing import Protocol

import torch

from ramet.attention.problem import Problem, SharePolicy, Support
from ramet.attention.work import WorkList


class Executor(Protocol):
    """A work list made ready for one backend; run once per layer."""

    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        sm_scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Write ``out``, and ``lse`` where it is given. Shapes are checked already."""


class Backend(Protocol):
    """A way to do attention."""

    name: str

    def supports(self, problem: Problem) -> Support:
        """Whether this backend serves the problem, and why."""

    def share_policy(self, problem: Problem) -> SharePolicy:
        """When reading a node once pays, as measured."""

    def compile(self, work: WorkList, problem: Problem) -> Executor:
        """Make a work list ready to run."""
