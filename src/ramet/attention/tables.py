"""Attention over block tables, in one call: for callers who keep a batch of their own, without a forest.

The same contract for all: tensors first, everything else by keyword; sizes come from the tensors. Block tables and
lengths may lie on the host: then exactly what is needed is planned. Or they lie on q's GPU: then nothing waits for
them, the plan covers ``max_kv_len``, and the kernel clamps to the lengths it finds (negative ones count as 0).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ramet.attention.planner import AttentionPlan, plan
from ramet.attention.types import ForestArrays
from ramet.errors import InvalidArgument, nearest

LAYOUTS = ("HND", "NHD")
KvCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

MLA_SCALE = (128 + 64) ** -0.5
"""DeepSeek's: of a head before absorption (128 elements without position and 64 with), not of the 576 of a latent."""


def decode_attention(
    q: torch.Tensor,
    kv_cache: KvCache,
    *,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    kv_layout: str = "HND",
    sm_scale: float | torch.Tensor | None = None,
    out_scale: float | torch.Tensor | None = None,
    softcap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    deterministic: bool = False,
    max_kv_len: int | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from the last tokens of every sequence to its pages.

    Parameters
    ----------
    q : Tensor [num_tokens, num_qo_heads, head_dim]
        Query tokens of all rows, one row after another.
    kv_cache : Tensor [num_pages, 2, num_kv_heads, page_size, head_dim] or (k, v)
        One layer's K and V, written already; ``(k, v)`` are ``[num_pages, num_kv_heads, page_size, head_dim]``. With
        ``kv_layout="NHD"`` page_size comes before num_kv_heads. Any strides but an innermost of 1.
    block_table : int32 Tensor [rows, width]
        Pages of each row, on the host or on q's device. Entries behind a row's length may be anything.
    seq_lens : int32 Tensor [rows]
        Context lengths, the query tokens included, where ``block_table`` is. A row of length 0 gives 0 and lse -inf.
    cu_seqlens_q : int32 Tensor [rows + 1], optional
        Offsets of each row's tokens in q, on the host. Default: as many for every row.
    kv_layout : {"HND", "NHD"}
    sm_scale : float or float32 Tensor, optional
        Factor of the scores (``q_scale * k_scale * sm_scale`` where they are quantised). Default: head_dim ** -0.5.
    out_scale : float or float32 Tensor, optional
        Factor of the output (``v_scale / o_scale``); None is no factor.
    softcap, window_left, sinks, causal, deterministic
        As for :func:`plan` and :meth:`AttentionPlan.run`; ``causal`` is aligned to the end of a row.
    max_kv_len : int, optional
        An upper bound of ``seq_lens`` where they lie on the device. Default: what the table's width holds. It changes
        speed, never results; rows that are longer are cut to it.
    out, return_lse
        As for :meth:`AttentionPlan.run`.
    backend : str, optional
        As for :func:`plan`.

    Returns
    -------
    Tensor [num_tokens, num_qo_heads, head_dim]
        With ``return_lse`` also the log-sum-exp (natural log), float32 ``[num_tokens, num_qo_heads]``.

    Raises
    ------
    InvalidArgument
        An argument does not fit; it is named, with what it is and what it must be.
    Unsupported
        No backend serves the problem; every backend's reason is given.

    Examples
    --------
    Three keys, all alike: the query takes the mean of V.

    >>> v = torch.arange(4.0).view(1, 1, 4, 1)
    >>> table, lengths = torch.tensor([[0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    >>> decode_attention(torch.ones(1, 1, 1), (torch.ones_like(v), v), block_table=table, seq_lens=lengths).item()
    1.0
    """
    k_pool, v_pool = _pools(kv_cache, kv_layout)
    if q.ndim != 3:
        raise InvalidArgument(f"q has shape {tuple(q.shape)}; it must be [num_tokens, num_qo_heads, head_dim].")
    work, dynamic = _plan_tables(
        q, k_pool, v_pool, block_table, seq_lens, _q_lens(q, block_table, cu_seqlens_q), max_kv_len, backend,
        softcap=softcap, window_left=window_left, has_sinks=sinks is not None, causal=causal,
        deterministic=deterministic, has_out_scale=out_scale is not None,
    )  # fmt: skip
    scale = q.shape[2] ** -0.5 if sm_scale is None else sm_scale
    return work.run(
        q, k_pool, v_pool, sm_scale=scale, sinks=sinks, out_scale=out_scale, out=out, return_lse=return_lse, **dynamic
    )


def context_attention(
    q: torch.Tensor,
    kv_cache: KvCache,
    *,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_layout: str = "HND",
    sm_scale: float | torch.Tensor | None = None,
    out_scale: float | torch.Tensor | None = None,
    softcap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    deterministic: bool = False,
    max_kv_len: int | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from chunks of prompts to their pages: :func:`decode_attention` with the chunks' offsets.

    Parameters, results and errors are those of :func:`decode_attention`; ``cu_seqlens_q`` is needed.

    Examples
    --------
    A prompt of two tokens; the first sees itself only:

    >>> v = torch.arange(4.0).view(1, 1, 4, 1)
    >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> context_attention(torch.ones(2, 1, 1), (torch.ones_like(v), v), block_table=ints([0]), seq_lens=ints(2),
    ...                   cu_seqlens_q=ints(0, 2)).flatten().tolist()
    [0.0, 0.5]
    """
    return decode_attention(
        q, kv_cache, block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, kv_layout=kv_layout,
        sm_scale=sm_scale, out_scale=out_scale, softcap=softcap, window_left=window_left, sinks=sinks, causal=causal,
        deterministic=deterministic, max_kv_len=max_kv_len, out=out, return_lse=return_lse, backend=backend,
    )  # fmt: skip


def mla_decode_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    v_head_dim: int = 512,
    sm_scale: float | torch.Tensor = MLA_SCALE,
    out_scale: float | torch.Tensor | None = None,
    max_kv_len: int | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multi-head latent attention, absorbed: one latent per token is K, and its first part V, of all heads.

    Parameters
    ----------
    q : Tensor [num_tokens, num_qo_heads, width]
        Absorbed queries: 512 elements against the latent, then 64 with position.
    kv_cache : Tensor [num_pages, page_size, width]
        Width is 576 for DeepSeek's models: 512 of the latent and 64 with position.
    v_head_dim : int, default 512
        Elements of a latent that are V.
    sm_scale : float or float32 Tensor, default 192 ** -0.5
        That of the un-absorbed head: 128 elements without and 64 with position.
    block_table, seq_lens, cu_seqlens_q, out_scale, max_kv_len, out, return_lse, backend
        As for :func:`decode_attention`.

    Returns
    -------
    Tensor [num_tokens, num_qo_heads, v_head_dim]
        With ``return_lse`` also lse.

    Examples
    --------
    >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> mla_decode_attention(torch.ones(1, 16, 576), torch.ones(1, 4, 576), block_table=ints([0]),
    ...                      seq_lens=ints(3)).shape
    torch.Size([1, 16, 512])
    """
    if q.ndim != 3 or kv_cache.ndim != 3 or not 1 <= v_head_dim <= kv_cache.shape[2]:
        raise InvalidArgument(
            f"q has shape {tuple(q.shape)}, kv_cache {tuple(kv_cache.shape)} and v_head_dim is {v_head_dim}; they must "
            "be [num_tokens, num_qo_heads, width], [num_pages, page_size, width] and from 1 to width."
        )
    k_pool = kv_cache.unsqueeze(2)
    v_pool = k_pool[..., :v_head_dim]
    work, dynamic = _plan_tables(
        q, k_pool, v_pool, block_table, seq_lens, _q_lens(q, block_table, cu_seqlens_q), max_kv_len, backend,
        has_out_scale=out_scale is not None, v_head_dim=v_head_dim,
    )  # fmt: skip
    return work.run(
        q, k_pool, v_pool, sm_scale=sm_scale, out_scale=out_scale, out=out, return_lse=return_lse, **dynamic
    )


def _pools(kv_cache: KvCache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as views [num_pages, page_size, num_kv_heads, head_dim]."""
    if kv_layout not in LAYOUTS:
        raise InvalidArgument(f"kv_layout is {kv_layout!r}{nearest(str(kv_layout), LAYOUTS)} Allowed: HND, NHD.")
    if isinstance(kv_cache, torch.Tensor):
        if kv_cache.ndim != 5 or kv_cache.shape[1] != 2:
            raise InvalidArgument(
                f"kv_cache has shape {tuple(kv_cache.shape)}; it must be [num_pages, 2, num_kv_heads, page_size, "
                "head_dim] (HND), or with page_size first (NHD), or a tuple (k, v)."
            )
        k, v = kv_cache.unbind(1)
    else:
        k, v = kv_cache
    for name, pool in (("k", k), ("v", v)):
        if pool.ndim != 4:
            raise InvalidArgument(f"kv_cache: {name} has shape {tuple(pool.shape)}; it must have four dimensions.")
    return (k, v) if kv_layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))


def _q_lens(q: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> tuple[int, ...]:
    """Query tokens of each row."""
    if block_table.ndim != 2 or block_table.dtype != torch.int32:
        raise InvalidArgument(
            f"block_table is {block_table.dtype} {tuple(block_table.shape)}; it must be torch.int32 [rows, width]."
        )
    rows = len(block_table)
    if cu_seqlens_q is None:
        if not rows or len(q) % rows:
            raise InvalidArgument(f"q has {len(q)} tokens for {rows} rows; give cu_seqlens_q, or as many for each row.")
        return (len(q) // rows,) * rows
    if cu_seqlens_q.device.type != "cpu" or cu_seqlens_q.shape != (rows + 1,) or cu_seqlens_q.is_floating_point():
        raise InvalidArgument(
            f"cu_seqlens_q is {cu_seqlens_q.dtype} {tuple(cu_seqlens_q.shape)} on {cu_seqlens_q.device}; it must be "
            f"integers ({rows + 1},) on the host, since it shapes the plan."
        )
    offsets = cu_seqlens_q.tolist()
    lens = tuple(b - a for a, b in pairwise(offsets))
    if offsets[0] != 0 or offsets[-1] != len(q) or min(lens, default=0) < 0:
        raise InvalidArgument(
            f"cu_seqlens_q is {offsets[:8]}...; it must begin with 0, never decrease, and end with {len(q)}, "
            "q's number of tokens."
        )
    return lens


def _plan_tables(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_lens: tuple[int, ...],
    max_kv_len: int | None,
    backend: str | None,
    **options: Any,
) -> tuple[AttentionPlan, dict[str, torch.Tensor]]:
    """A plan for block tables, and what ``run`` reads on the device."""
    rows, width = block_table.shape
    if seq_lens.dtype != torch.int32 or seq_lens.shape != (rows,) or seq_lens.device != block_table.device:
        raise InvalidArgument(
            f"seq_lens are {seq_lens.dtype} {tuple(seq_lens.shape)} on {seq_lens.device}; they must be torch.int32 "
            f"({rows},) on {block_table.device}, like block_table."
        )
    if max_kv_len is not None and (not isinstance(max_kv_len, int) or max_kv_len < 0):
        raise InvalidArgument(f"max_kv_len is {max_kv_len!r}; it must be an integer of at least 0.")
    page_size = k_pool.shape[1]
    shape = (q.shape[1], k_pool.shape[2], q.shape[2], page_size)
    if not q.is_cuda and backend is None and not (k_pool.is_contiguous() and v_pool.is_contiguous()):
        backend = "-cpu"  # it reads contiguous pools only, and says so where it is pinned
    key = (shape, q.dtype, None if k_pool.dtype == q.dtype else k_pool.dtype, str(q.device), backend)
    if block_table.device.type == "cpu":
        return _plan_on_host(block_table.numpy(), seq_lens.numpy(), q_lens, page_size, key, options)
    if block_table.device != q.device:
        raise InvalidArgument(f"block_table is on {block_table.device}; allowed: the host, and q's {q.device}.")
    bound = width * page_size if max_kv_len is None else min(max_kv_len, width * page_size)
    bound = max(bound, *q_lens, 0)
    if bound > width * page_size:
        raise InvalidArgument(
            f"block_table has {width} pages of {page_size} tokens a row; a row has {max(q_lens)} query tokens."
        )
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(
            "this call plans, which cannot be captured in a graph; capture AttentionPlan.run of a plan with buffers."
        )
    work = _plan_for_bounds(rows, width, bound, q_lens, key, tuple(sorted(options.items())))
    return work, {"seq_lens": seq_lens, "page_lists": block_table.contiguous().view(-1)}


def _make(forest: ForestArrays, key: tuple[Any, ...], **options: Any) -> AttentionPlan:
    (heads, kv_heads, head_dim, page_size), dtype, kv_dtype, device, backend = key
    return plan(
        forest, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype,
        kv_dtype=kv_dtype, device=device, backend=backend, **options,
    )  # fmt: skip


def _forest(q_lens: tuple[int, ...], end: np.ndarray, pages: np.ndarray, per_row: np.ndarray) -> ForestArrays:
    """One node per row."""
    rows = len(q_lens)
    zeros = np.zeros(rows, np.int32)
    return ForestArrays(
        cu_seqlens_q=np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
        row_leaf=np.arange(rows, dtype=np.int32),
        node_parent=zeros - 1,
        node_start=zeros,
        node_end=end.astype(np.int32),
        node_first_slot=zeros,
        node_page_indptr=np.concatenate([[0], np.cumsum(per_row)]).astype(np.int32),
        node_pages=pages.astype(np.int32),
    )


@lru_cache(maxsize=64)
def _plan_for_bounds(
    rows: int,
    width: int,
    bound: int,
    q_lens: tuple[int, ...],
    key: tuple[Any, ...],
    options: tuple[tuple[str, Any], ...],
) -> AttentionPlan:
    """A plan whose pages are indices into the flattened table; kept, since it depends on nothing on the device."""
    forest = _forest(q_lens, np.full(rows, bound), np.arange(rows * width), np.full(rows, width))
    return _make(forest, key, has_seq_lens=True, has_page_lists=True, **dict(options))


def _plan_on_host(
    table: np.ndarray,
    lengths: np.ndarray,
    q_lens: tuple[int, ...],
    page_size: int,
    key: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[AttentionPlan, dict[str, torch.Tensor]]:
    if len(lengths) and lengths.min() < 0:
        row = int(np.argmin(lengths))
        raise InvalidArgument(f"seq_lens[{row}] is {lengths[row]}; allowed: at least 0.")
    width = table.shape[1]
    bound = np.maximum(lengths, q_lens)
    need = -(-bound // page_size)
    if len(need) and need.max() > width:
        row = int(np.argmax(need > width))
        raise InvalidArgument(
            f"block_table has {width} pages of {page_size} tokens a row; row {row} needs {need[row]} pages."
        )
    pages = table[np.arange(width) < need[:, None]]
    if (bound == lengths).all():
        return _make(_forest(q_lens, bound, pages, need), key, **options), {}
    # Rows shorter than their queries: the first of these see nothing. Pages behind their length are not read.
    behind = np.arange(width) >= -(-lengths // page_size)[:, None]
    pages = np.where(behind, 0, table)[np.arange(width) < need[:, None]]
    work = _make(_forest(q_lens, bound, pages, need), key, has_seq_lens=True, **options)
    return work, {"seq_lens": torch.from_numpy(lengths).to(key[3])}
