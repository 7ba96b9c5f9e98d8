"""Merging the partials that ``forest`` left, in Triton. A partial is (output, natural log-sum-exp); (0, -inf) is empty."""

from __future__ import annotations

import triton
import triton.language as tl

from ramet.attention.kernels.forest import LN2, LOG2E, LOWEST, factor, rounded


@triton.jit
def merge_kernel(
    OUT, LSE, PARTIAL, PARTIAL_LSE, SINKS, COUNTS, TOKENS, PARTS, out_scale,
    ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr, OUT_SCALE_TENSOR: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Merge the partials of ROWS pairs of token and head, four at a time; those with one partial are written already.

    A token without any partial (an empty context) gets the empty state.
    """
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = pair // HEADS
    head = pair % HEADS
    real = token < tl.load(COUNTS + 2)
    begin = tl.load(PARTS + token, mask=real, other=0)
    count = tl.load(PARTS + token + 1, mask=real, other=1) - begin
    writes = real & (count != 1)
    count = tl.where(writes, count, 0)
    most = tl.max(count, 0)
    any_writes = tl.max(writes.to(tl.int32), 0)
    if any_writes > 0:
        d = tl.arange(0, BLOCK_D)
        inside = (d < D)[None, :]
        top = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        place = begin.to(tl.int64) * HEADS + head
        for i in range(0, most, 4):
            at = place + i * HEADS
            l0 = tl.load(PARTIAL_LSE + at, mask=i < count, other=float("-inf"))
            l1 = tl.load(PARTIAL_LSE + at + HEADS, mask=i + 1 < count, other=float("-inf"))
            l2 = tl.load(PARTIAL_LSE + at + 2 * HEADS, mask=i + 2 < count, other=float("-inf"))
            l3 = tl.load(PARTIAL_LSE + at + 3 * HEADS, mask=i + 3 < count, other=float("-inf"))
            rows = PARTIAL + at[:, None] * D + d[None, :]
            o0 = tl.load(rows, mask=(i < count)[:, None] & inside, other=0.0)
            o1 = tl.load(rows + HEADS * D, mask=(i + 1 < count)[:, None] & inside, other=0.0)
            o2 = tl.load(rows + 2 * HEADS * D, mask=(i + 2 < count)[:, None] & inside, other=0.0)
            o3 = tl.load(rows + 3 * HEADS * D, mask=(i + 3 < count)[:, None] & inside, other=0.0)
            new_top = tl.maximum(top, tl.maximum(tl.maximum(l0, l1), tl.maximum(l2, l3)))
            keeps = tl.exp2((top - new_top) * LOG2E)
            w0 = tl.exp2((l0 - new_top) * LOG2E)
            w1 = tl.exp2((l1 - new_top) * LOG2E)
            w2 = tl.exp2((l2 - new_top) * LOG2E)
            w3 = tl.exp2((l3 - new_top) * LOG2E)
            acc = acc * keeps[:, None] + o0 * w0[:, None] + o1 * w1[:, None] + o2 * w2[:, None] + o3 * w3[:, None]
            total = total * keeps + w0 + w1 + w2 + w3
            top = new_top
        _finish(
            acc, total, top, token, head, writes, OUT, LSE, SINKS, TOKENS, out_scale,
            HEADS, D, BLOCK_D, HAS_SINKS, HAS_LSE, OUT_SCALE_TENSOR, INTERPRET,
        )  # fmt: skip


@triton.jit
def _finish(
    acc, total, top, token, head, writes, OUT, LSE, SINKS, TOKENS, out_scale,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    OUT_SCALE_TENSOR: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Write merged rows; 0 and -inf where a row has seen nothing."""
    d = tl.arange(0, BLOCK_D)
    some = total > 0.0
    denominator = total
    if HAS_SINKS:
        sink = tl.load(SINKS + head, mask=writes, other=0.0)
        # Far below the sink the ratio is 0, and exp2 may overflow to inf: x / inf is 0.
        denominator = total + tl.exp2((sink - top) * LOG2E)
    o = acc / tl.where(some, denominator, 1.0)[:, None]
    o = o * factor(out_scale, OUT_SCALE_TENSOR)
    target = tl.load(TOKENS + token * 3, mask=writes, other=0).to(tl.int64) * HEADS + head
    tl.store(
        OUT + target[:, None] * D + d[None, :],
        rounded(o, OUT.dtype.element_ty, INTERPRET),
        mask=writes[:, None] & (d < D)[None, :],
    )
    if HAS_LSE:
        # One partial beside empty ones keeps its lse to the bit.
        lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)) * LN2, float("-inf"))
        tl.store(LSE + target, lse, mask=writes)


@triton.jit
def merge_many_kernel(
    OUT, LSE, PARTIAL, PARTIAL_LSE, SINKS, COUNTS, TOKENS, PARTS, out_scale,
    MANY: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr, OUT_SCALE_TENSOR: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The same for one pair of token and head a program, MANY partials at a time: for few rows with many partials."""
    token = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    if token < tl.load(COUNTS + 2):
        begin = tl.load(PARTS + token)
        count = tl.load(PARTS + token + 1) - begin
        if count != 1:
            d = tl.arange(0, BLOCK_D)
            top = tl.full([1], LOWEST, tl.float32)
            total = tl.zeros([1], tl.float32)
            acc = tl.zeros([1, BLOCK_D], tl.float32)
            for i in range(0, count, MANY):
                each = i + tl.arange(0, MANY)
                at = (begin + each).to(tl.int64) * HEADS + head
                lse = tl.load(PARTIAL_LSE + at, mask=each < count, other=float("-inf"))
                mask = (each < count)[:, None] & (d < D)[None, :]
                o = tl.load(PARTIAL + at[:, None] * D + d[None, :], mask=mask, other=0.0)
                new_top = tl.maximum(top, tl.max(lse, 0))
                keeps = tl.exp2((top - new_top) * LOG2E)
                weights = tl.exp2((lse - new_top) * LOG2E)
                acc = acc * keeps[:, None] + tl.sum(o * weights[:, None], 0)[None, :]
                total = total * keeps + tl.sum(weights, 0)
                top = new_top
            one = tl.arange(0, 1)
            _finish(
                acc, total, top, token + one, head + one, one == 0, OUT, LSE, SINKS, TOKENS, out_scale,
                HEADS, D, BLOCK_D, HAS_SINKS, HAS_LSE, OUT_SCALE_TENSOR, INTERPRET,
            )  # fmt: skip
