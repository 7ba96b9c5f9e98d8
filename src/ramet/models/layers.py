"""The layers of a dense decoder. Every function here gives a row the same bits in any batch (see ``MIN_ROWS``).

On a CPU a small step is bound by the number of kernels: after each GEMM has pushed the weights through the caches, any
kernel costs 3 to 5 us, however little it does. So a block is four GEMMs, two norms of one kernel each, and few others:

- The residual stream carries :data:`EPS_COLUMNS` more columns, the first of which always holds ``sqrt(eps * size)``.
  Then ``x / |x|``, a single kernel, is ``x / sqrt(sum(x^2) + eps * size)``: RMSNorm but for ``sqrt(size)`` and weight.
- These two are absorbed into the rows' next linear (:func:`absorb_norm`).
- Linears that end in the stream have zero rows for these columns (:func:`widen`) and add the residual themselves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = 3
"""Smallest batch of a GEMM: oneDNN and MKL switch to kernels with another summation order at 1 and 2 rows."""

EPS_COLUMNS = 16
"""One would do; 16 keep the rows aligned, which the GEMMs reward."""


def padded(x: Tensor) -> Tensor:
    """Return ``x [M, ...]`` with at least :data:`MIN_ROWS` rows; the added ones are zero."""
    missing = MIN_ROWS - x.shape[0]
    return x if missing <= 0 else torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and CPU have oneDNN for the dtype; without it linears are plain, slower, and bits may vary."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


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
        self.packed = _can_pack(weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight
        # Overloads are looked up once: a packet would resolve its overload anew in every call (1 us).
        self._run = torch.ops.mkldnn._linear_pointwise.default if self.packed else None
        self._run_add = torch.ops.mkldnn._linear_pointwise.binary if self.packed else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[M, out_features]`` for ``x [M, in_features]``, M >= :data:`MIN_ROWS`."""
        if self._run is None:
            return F.linear(x, self.weight, self.bias)
        return self._run(x, self.weight, self.bias, "none", [], "")

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ``self(x) + residual``, rounded once."""
        if self._run_add is None:
            return F.linear(x, self.weight, self.bias).add_(residual)
        return self._run_add(x, residual, self.weight, self.bias, "add")


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32, given back in the weight's dtype.

    For the places outside the residual stream. Its kernels are exact per element, so that bits do not depend on where
    in a batch a row lies (``rsqrt`` would round differently there).
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self.dtype = weight.dtype
        # sum(x^2) takes the place of the mean: both constants absorb the size.
        self.scaled_weight = weight.float() * size**0.5
        self.scaled_eps = eps * size

    def __call__(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        norm.square_().add_(self.scaled_eps).sqrt_()
        return torch.div(x, norm).mul_(self.scaled_weight).to(self.dtype)


def unit_rows(x: Tensor, ones: Tensor) -> Tensor:
    """Return ``x [M, N]`` with rows of length 1; ``ones`` is ``[M, 1]``. One kernel, statistics in float32."""
    return torch._weight_norm(x, ones, 0)


def absorb_norm(weight: Tensor, norm_weight: Tensor) -> Tensor:
    """Return the weight ``[N, size + EPS_COLUMNS]`` of a linear that takes :func:`unit_rows` of the residual stream."""
    size = norm_weight.shape[0]
    return F.pad(weight.float() * (norm_weight.float() * size**0.5), (0, EPS_COLUMNS))


def widen(weight: Tensor) -> Tensor:
    """Return the weight ``[size + EPS_COLUMNS, N]`` (or bias) of a linear that ends in the residual stream."""
    zeros = weight.new_zeros((EPS_COLUMNS, *weight.shape[1:]))
    return torch.cat((weight, zeros))


def with_eps_column(rows: Tensor, eps: float) -> Tensor:
    """Return ``rows [N, size]`` as rows of the residual stream, ``[N, size + EPS_COLUMNS]``."""
    wide = F.pad(rows, (0, EPS_COLUMNS))
    wide[:, rows.shape[1]] = (eps * rows.shape[1]) ** 0.5
    return wide


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` for ``gate_up [M, 2 * intermediate]``."""
    size = gate_up.shape[1] // 2
    gate, up = gate_up.split_with_sizes((size, size), 1)
    if gate.dtype == torch.bfloat16:
        return F.silu(gate).mul_(up)
    # F.silu in float32 rounds the odd elements at the end of a thread's share differently, so bits would depend on the
    # batch; exp does not, nor do exact operations. (All 65,536 bfloat16 values come out alike.)
    denominator = gate.neg().exp_().add_(1.0)
    return torch.div(gate, denominator, out=denominator).mul_(up)
