"""Merges a token's partials from two calls of FlashAttention-4 in one launch. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    out,  # [tokens, HEADS, D]
    out_lse,  # [tokens, HEADS]; written where HAS_LSE
    tail,  # [tokens, HEADS, D]
    tail_lse,  # [HEADS, tokens]
    before,  # [entries, HEADS, D]
    before_lse,  # [HEADS, entries]
    parts,  # [tokens + 1]
    part_entry,
    target,  # [tokens]: where in out a tail entry goes
    tokens,
    entries,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """One program merges BLOCK_H heads of one token; an lse of -inf is the empty state, whose output is not used."""
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    in_heads = head < HEADS
    mask = in_heads[:, None] & (column < D)[None, :]
    place = head[:, None] * D + column[None, :]
    largest = tl.load(tail_lse + head * tokens + token, mask=in_heads, other=float("-inf"))
    weight = tl.where(largest == float("-inf"), 0.0, 1.0)
    value = tl.load(tail + token.to(tl.int64) * HEADS * D + place, mask=mask, other=0.0).to(tl.float32)
    total = tl.where(weight[:, None] > 0, value, 0.0)
    for i in range(tl.load(parts + token), tl.load(parts + token + 1)):
        entry = tl.load(part_entry + i).to(tl.int64)
        lse = tl.load(before_lse + head * entries + entry, mask=in_heads, other=float("-inf"))
        value = tl.load(before + entry * HEADS * D + place, mask=mask, other=0.0).to(tl.float32)
        higher = tl.maximum(largest, lse)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        old, new = tl.exp(largest - base), tl.exp(lse - base)
        total = total * old[:, None] + tl.where(new[:, None] > 0, value * new[:, None], 0.0)
        weight = weight * old + new
        largest = higher
    row = tl.load(target + token).to(tl.int64)
    empty = weight == 0.0
    result = total / tl.where(empty, 1.0, weight)[:, None]
    tl.store(out + row * HEADS * D + place, result.to(out.dtype.element_ty), mask=mask)
    if HAS_LSE:
        merged = tl.where(empty, float("-inf"), largest + tl.log(tl.where(empty, 1.0, weight)))
        tl.store(out_lse + row * HEADS + head, merged, mask=in_heads)
