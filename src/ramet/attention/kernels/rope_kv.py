"""Rotary positions, optional norms of q and k, and the write of K and V, in one launch of Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from ramet.attention.kernels.forest import rounded


@triton.jit
def _part(X, offset, index, mask, INTERPRET: tl.constexpr):
    x = tl.load(X + offset[:, None] + index[None, :], mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _turn(
    X, W, OUT, COS_SIN, source, target, position, keep, eps,
    D: tl.constexpr, ROTARY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Norm and turn some heads of one token: rows ``source`` of X go to rows ``target`` of OUT."""
    pair = tl.arange(0, BLOCK_R)
    rest = ROTARY + tl.arange(0, BLOCK_REST)
    if INTERLEAVED:
        one = 2 * pair
        two = 2 * pair + 1
    else:
        one = pair
        two = pair + ROTARY // 2
    turned = keep[:, None] & (pair < ROTARY // 2)[None, :]
    stays = keep[:, None] & (rest < D)[None, :]
    a = _part(X, source, one, turned, INTERPRET)
    b = _part(X, source, two, turned, INTERPRET)
    c = _part(X, source, rest, stays, INTERPRET)
    if HAS_NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        factor = 1.0 / tl.sqrt(squares / D + eps)
        a = a * factor[:, None] * tl.load(W + one, mask=pair < ROTARY // 2, other=0.0).to(tl.float32)[None, :]
        b = b * factor[:, None] * tl.load(W + two, mask=pair < ROTARY // 2, other=0.0).to(tl.float32)[None, :]
        c = c * factor[:, None] * tl.load(W + rest, mask=rest < D, other=0.0).to(tl.float32)[None, :]
    cos = tl.load(COS_SIN + position * ROTARY + pair, mask=pair < ROTARY // 2, other=0.0)[None, :]
    sin = tl.load(COS_SIN + position * ROTARY + ROTARY // 2 + pair, mask=pair < ROTARY // 2, other=0.0)[None, :]
    row = OUT + target[:, None]
    tl.store(row + one[None, :], rounded(a * cos - b * sin, OUT.dtype.element_ty, INTERPRET), mask=turned)
    tl.store(row + two[None, :], rounded(b * cos + a * sin, OUT.dtype.element_ty, INTERPRET), mask=turned)
    tl.store(row + rest[None, :], rounded(c, OUT.dtype.element_ty, INTERPRET), mask=stays)


@triton.jit
def rope_kv_kernel(
    Q, K, V, OUT, K_POOL, V_POOL, POSITIONS, SLOTS, COS_SIN, Q_NORM, K_NORM, eps, num_slots,
    q_stride_token, q_stride_head, k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    k_pool_page, k_pool_slot, k_pool_head, v_pool_page, v_pool_slot, v_pool_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (token, block): a block of query heads, or, behind those, of KV heads. Bad slots are not written."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(POSITIONS + token)
    query_blocks = tl.cdiv(HEADS, BLOCK_H)
    if block < query_blocks:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        _turn(
            Q, Q_NORM, OUT, COS_SIN, token * q_stride_token + head * q_stride_head, (token * HEADS + head) * D,
            position, head < HEADS, eps, D, ROTARY, BLOCK_R, BLOCK_REST, INTERLEAVED, HAS_Q_NORM, INTERPRET,
        )  # fmt: skip
    else:
        head = (block - query_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        slot = tl.load(SLOTS + token)
        heads = KV_HEADS
        if slot < 0 or slot >= num_slots:
            heads = 0
        keep = head < heads
        page = slot // PAGE
        within = slot % PAGE
        _turn(
            K, K_NORM, K_POOL, COS_SIN, token * k_stride_token + head * k_stride_head,
            page * k_pool_page + within * k_pool_slot + head * k_pool_head,
            position, keep, eps, D, ROTARY, BLOCK_R, BLOCK_REST, INTERLEAVED, HAS_K_NORM, INTERPRET,
        )  # fmt: skip
        d = tl.arange(0, BLOCK_D)
        mask = keep[:, None] & (d < D)[None, :]
        v = tl.load(V + (token * v_stride_token + head * v_stride_head)[:, None] + d[None, :], mask=mask, other=0.0)
        target = page * v_pool_page + within * v_pool_slot + head * v_pool_head
        tl.store(V_POOL + target[:, None] + d[None, :], v, mask=mask)
