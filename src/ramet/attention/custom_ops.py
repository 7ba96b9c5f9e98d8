"""The stateless operations as PyTorch custom operators, so that ``torch.compile`` and ``torch.export`` see them.

``torch.ops.ramet.paged_attention``, ``append_kv`` and ``merge_states`` have fake versions: shapes and dtypes only.
Importing this module registers them.
"""

from __future__ import annotations

import torch

from ramet.attention import ops, tables


@torch.library.custom_op("ramet::paged_attention", mutates_args=())
def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    kv_layout: str,
    sm_scale: float,
    softcap: float,
    window_left: int,
    causal: bool,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`ramet.attention.decode_attention` with its log-sum-exp; q and the caches are as there."""
    return tables.decode_attention(  # type: ignore[return-value]
        q, (k, v), block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, kv_layout=kv_layout,
        sm_scale=sm_scale, softcap=softcap, window_left=window_left, causal=causal, sinks=sinks, return_lse=True,
    )  # fmt: skip


@paged_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    kv_layout: str,
    sm_scale: float,
    softcap: float,
    window_left: int,
    causal: bool,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("ramet::append_kv", mutates_args=("k_pool", "v_pool"))
def append_kv(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """:func:`ramet.attention.append_kv`."""
    ops.append_kv(k, v, k_pool, v_pool, slot_mapping)


@append_kv.register_fake
def _(k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    return None


@torch.library.custom_op("ramet::merge_states", mutates_args=())
def merge_states(
    o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`ramet.attention.merge_states`."""
    return ops.merge_states(o1, lse1, o2, lse2)


@merge_states.register_fake
def _(o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(o1), torch.empty_like(lse1)
