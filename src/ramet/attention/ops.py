"""Stateless operations for callers who keep their own batch: merging partials, writing K and V, a one-off attention."""

from __future__ import annotations

import torch

from ramet.attention.planner import plan
from ramet.attention.types import ForestArrays
from ramet.errors import InvalidArgument


def merge_states(
    o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two partial attention states over disjoint keys into the state over all of them.

    Parameters
    ----------
    o1, o2 : Tensor [..., head_dim]
        Partial outputs, of one shape and dtype.
    lse1, lse2 : Tensor [...], float32
        Their log-sum-exp (natural log). -inf is the empty state, whose output is ignored.

    Returns
    -------
    o : Tensor [..., head_dim]
        Of the dtype of ``o1``; 0 where both are empty.
    lse : Tensor [...], float32

    Raises
    ------
    InvalidArgument
        Shapes or dtypes that do not fit.

    Examples
    --------
    >>> one, two = torch.tensor([1.0, 1.0]), torch.tensor([3.0, 3.0])
    >>> o, lse = merge_states(one, torch.tensor(0.0), two, torch.tensor(0.0))
    >>> o.tolist(), round(lse.item(), 4)
    ([2.0, 2.0], 0.6931)
    """
    if o1.shape != o2.shape or o1.dtype != o2.dtype:
        raise InvalidArgument(
            f"o1 is {o1.dtype} {tuple(o1.shape)} and o2 is {o2.dtype} {tuple(o2.shape)}; they must be alike."
        )
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        if lse.shape != o1.shape[:-1] or lse.dtype != torch.float32:
            raise InvalidArgument(
                f"{name} is {lse.dtype} {tuple(lse.shape)}; it must be torch.float32 {tuple(o1.shape[:-1])}."
            )
    merged = torch.logaddexp(lse1, lse2)
    finite = merged.masked_fill(merged == -torch.inf, 0.0)  # where both are empty: exp(-inf - 0) is 0, not NaN
    wide = torch.promote_types(o1.dtype, torch.float32)
    total = torch.zeros(o1.shape, dtype=wide, device=o1.device)
    for o, lse in ((o1, lse1), (o2, lse2)):
        share = torch.exp(lse - finite)[..., None]
        total += torch.where(share > 0, share * o, 0.0)  # what an empty state holds may be NaN
    return total.to(o1.dtype), merged


def append_kv(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write new tokens' K and V to their KV slots.

    Parameters
    ----------
    k, v : Tensor [num_tokens, num_kv_heads, head_dim]
        Any strides.
    k_pool, v_pool : Tensor [num_pages, page_size, num_kv_heads, head_dim]
        One layer's pool, contiguous, of the dtype of ``k``; written in place.
    slot_mapping : int64 Tensor [num_tokens]
        ``page * page_size + offset`` of each token, each at most once.

    Raises
    ------
    InvalidArgument
        A shape or dtype does not fit, or a slot lies outside the pool.

    Examples
    --------
    >>> k_pool, v_pool = torch.zeros(2, 4, 1, 2), torch.zeros(2, 4, 1, 2)
    >>> append_kv(torch.ones(1, 1, 2), torch.ones(1, 1, 2), k_pool, v_pool, torch.tensor([6]))
    >>> k_pool[1, 2].tolist()
    [[1.0, 1.0]]
    """
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != k.shape[:1]:
        raise InvalidArgument(
            f"slot_mapping is {slot_mapping.dtype} {tuple(slot_mapping.shape)}; it must be torch.int64 "
            f"{tuple(k.shape[:1])}, one slot per token of k."
        )
    for name, new, pool in (("k", k, k_pool), ("v", v, v_pool)):
        if pool.ndim != 4 or new.shape != (k.shape[0], *pool.shape[2:]) or new.dtype != pool.dtype:
            raise InvalidArgument(
                f"{name} is {new.dtype} {tuple(new.shape)}; it must be {pool.dtype} "
                f"{(k.shape[0], *pool.shape[2:])} for {name}_pool of shape {tuple(pool.shape)}."
            )
        if not pool.is_contiguous():
            raise InvalidArgument(f"{name}_pool has strides {pool.stride()}; it must be contiguous.")
        try:
            pool.flatten(0, 1).index_copy_(0, slot_mapping, new)
        except (IndexError, RuntimeError) as error:
            slots = pool.shape[0] * pool.shape[1]
            raise InvalidArgument(
                f"slot_mapping has a slot outside of {name}_pool; allowed: 0 to {slots - 1} ({error})."
            ) from error


def forest_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    *,
    forest: ForestArrays,
    sm_scale: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    gate: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Plan and run in one call; who attends in many layers over one forest calls :func:`plan` once instead.

    Heads, head size and page size are those of the tensors.

    Parameters
    ----------
    q : Tensor [num_tokens, num_qo_heads, head_dim]
    k_pool, v_pool : Tensor [num_pages, page_size, num_kv_heads, head_dim]
    forest : ForestArrays
    sm_scale : float, optional
        Default: ``head_dim ** -0.5``.
    out, return_lse
        As for :meth:`AttentionPlan.run`.
    backend, gate
        As for :func:`plan`.

    Returns
    -------
    Tensor [num_tokens, num_qo_heads, head_dim]
        With ``return_lse`` also lse, float32 ``[num_tokens, num_qo_heads]``.

    Examples
    --------
    One row with three positions, of which the last is its query; all keys are alike, so it takes the mean of V:

    >>> import numpy as np
    >>> ints = lambda *values: np.array(values, dtype=np.int32)
    >>> forest = ForestArrays(ints(0, 1), ints(0), ints(-1), ints(0), ints(3), ints(0), ints(0, 1), ints(0))
    >>> v_pool = torch.arange(4.0).view(1, 4, 1, 1)
    >>> forest_attention(torch.ones(1, 1, 1), torch.ones(1, 4, 1, 1), v_pool, forest=forest).item()
    1.0
    """
    if q.ndim != 3 or k_pool.ndim != 4:
        raise InvalidArgument(
            f"q has shape {tuple(q.shape)} and k_pool {tuple(k_pool.shape)}; they must be [num_tokens, num_qo_heads, "
            "head_dim] and [num_pages, page_size, num_kv_heads, head_dim]."
        )
    head_dim = q.shape[2]
    work = plan(
        forest,
        num_qo_heads=q.shape[1],
        num_kv_heads=k_pool.shape[2],
        head_dim=head_dim,
        page_size=k_pool.shape[1],
        backend=backend,
        gate=gate,
        device=q.device,
        dtype=q.dtype if q.is_cuda else None,
    )
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    return work.run(q, k_pool, v_pool, sm_scale=scale, out=out, return_lse=return_lse)
