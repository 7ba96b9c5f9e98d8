"""What is asked of attention, and what a backend answers before any tensor exists."""

from __future__ import annotations

import math
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
        A node is read once for all rows below it when ``(rows - 1) * tokens`` is at least this and what its rows cost;
        otherwise every row reads it with its tail.
    row_tokens : float, default 0.0
        What one more query token below such a node costs (a partial that is written, read and merged), as so many
        tokens to read.
    """

    min_saved_tokens: int
    row_tokens: float = 0.0


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
        Of q and the output; None while it is not known. Backends that compile kernels need it.
    kv_dtype : torch.dtype, optional
        Of K and V where it differs from ``dtype``.
    softcap : float, default 0.0
        Scores become ``softcap * tanh(score / softcap)``; 0 is off.
    window_left : int, default -1
        How many tokens to the left of itself a query sees; -1 is off.
    has_sinks : bool, default False
        Every query head has a sink: a score that enters the softmax's denominator only.
    deterministic : bool, default False
        A row's bits depend on nothing but its own tokens: not on the batch, nor on what is shared.
    max_q_len : int, default 1
        Most query tokens of a row, an upper bound. It changes speed, never results.
    causal : bool, default True
        A query sees the positions up to its own; otherwise all of its row's.
    v_head_dim : int, optional
        Elements of V and the output per head, where they are fewer than ``head_dim`` (MLA).
    has_out_scale : bool, default False
        The output is multiplied by a factor.
    has_seq_lens : bool, default False
        Context lengths are read on the device; the plan's are their upper bounds.
    has_page_lists : bool, default False
        Page lists are read on the device; the plan's name places in them.

    Raises
    ------
    InvalidArgument
        A number out of range, or heads that do not divide.

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
    kv_dtype: torch.dtype | None = None
    softcap: float = 0.0
    window_left: int = -1
    has_sinks: bool = False
    deterministic: bool = False
    max_q_len: int = 1
    causal: bool = True
    v_head_dim: int | None = None
    has_out_scale: bool = False
    has_seq_lens: bool = False
    has_page_lists: bool = False

    def __post_init__(self) -> None:
        least = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 1, "page_size": 1, "window_left": -1, "max_q_len": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise InvalidArgument(f"{name} is {value!r}; it must be an integer of at least {low}.")
        width = self.v_head_dim
        if width is not None and (not isinstance(width, int) or not 1 <= width <= self.head_dim):
            raise InvalidArgument(
                f"v_head_dim is {width!r}; it must be an integer from 1 to head_dim ({self.head_dim})."
            )
        if not 0.0 <= self.softcap < math.inf:
            raise InvalidArgument(f"softcap is {self.softcap!r}; it must be a finite number of at least 0 (0 is off).")
        if self.num_qo_heads % self.num_kv_heads:
            raise InvalidArgument(
                f"num_qo_heads is {self.num_qo_heads}; it must be a multiple of num_kv_heads ({self.num_kv_heads})."
            )

    @property
    def value_dim(self) -> int:
        """Elements of V and the output per head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def options(self) -> tuple[str, ...]:
        """Names of the features in use that not every backend has.

        Examples
        --------
        >>> Problem(4, 2, 64, 16, softcap=30.0, window_left=127).options()
        ('softcap', 'window_left')
        """
        used = {
            "kv_dtype": self.kv_dtype not in (None, self.dtype),
            "softcap": self.softcap > 0.0,
            "window_left": self.window_left >= 0,
            "sinks": self.has_sinks,
            "deterministic": self.deterministic,
            "causal=False": not self.causal,
            "v_head_dim": self.v_head_dim not in (None, self.head_dim),
            "out_scale": self.has_out_scale,
            "seq_lens": self.has_seq_lens,
            "page_lists": self.has_page_lists,
        }
        return tuple(name for name, on in used.items() if on)
