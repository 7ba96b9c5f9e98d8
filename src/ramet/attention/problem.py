"""What is asked of attention, and what a backend answers before any tensor exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ramet.errors import InvalidArgument


class Support(NamedTuple):
    """A backend's answer: whether it serves a problem, and why (in the words an error would use)."""

    ok: bool
    reason: str


class SharePolicy(NamedTuple):
    """When reading a node once pays.

    Attributes
    ----------
    min_saved_tokens : int
        A node is read once for all rows below it when ``(rows - 1) * tokens`` is at least this; otherwise every row
        reads it with its tail.
    """

    min_saved_tokens: int


@dataclass(frozen=True)
class Problem:
    """The shape of an attention problem: everything that the choice of a backend may depend on.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        ``num_qo_heads`` is a multiple of ``num_kv_heads``; their ratio is the size of the GQA group.
    head_dim : int
    page_size : int
        Tokens of a page.
    device : str, default "cpu"
        Device type, without an index.
    dtype : torch.dtype, optional
        Of q, K and V; None while it is not known.

    Raises
    ------
    InvalidArgument
        A number below 1, or heads that do not divide.

    Examples
    --------
    >>> Problem(num_qo_heads=9, num_kv_heads=3, head_dim=64, page_size=16).group_size
    3
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    device: str = "cpu"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"{name} is {value!r}; it must be an integer of at least 1.")
        if self.num_qo_heads % self.num_kv_heads:
            raise InvalidArgument(
                f"num_qo_heads is {self.num_qo_heads}; it must be a multiple of num_kv_heads ({self.num_kv_heads})."
            )

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head."""
        return self.num_qo_heads // self.num_kv_heads
