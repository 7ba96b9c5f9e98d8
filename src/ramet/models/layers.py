"""The layers of a dense decoder: packed linears and RMSNorm. Every function gives a row the same bits in any batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = 3
"""Smallest batch of a GEMM: oneDNN and MKL switch to kernels with another summation order at 1 and 2 rows."""


def padded(x: Tensor) -> Tensor:
    """Return ``x [M, ...]`` with at least :data:`MIN_ROWS` rows; the added ones are zero."""
    missing = MIN_ROWS - x.shape[0]
    return x if missing <= 0 else torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))


class Linear:
    """``y = x W^T (+ bias) (+ residual)`` with the weight packed once for oneDNN.

    Parameters
    ----------
    weight : Tensor [out_features, in_features]
        float32 or bfloat16. Only a packed copy is kept.
    bias : Tensor [out_features], optional
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.packed = torch.backends.mkldnn.is_available()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight
        # Overloads looked up once: a packet resolves its overload anew in every call (1 us).
        self._run = torch.ops.mkldnn._linear_pointwise.default if self.packed else None
        self._run_add = torch.ops.mkldnn._linear_pointwise.binary if self.packed else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return float ``[M, out_features]`` for ``x [M, in_features]``, M >= :data:`MIN_ROWS`."""
        if self._run is None:
            return F.linear(x, self.weight, self.bias)
        return self._run(x, self.weight, self.bias, "none", [], "")

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ``self(x) + residual`` in one pass over the output."""
        if self._run_add is None:
            return F.linear(x, self.weight, self.bias).add_(residual)
        return self._run_add(x, residual, self.weight, self.bias, "add")


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, statistics in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.shape = (weight.shape[0],)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` for ``gate_up [M, 2 * intermediate]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
