"""Merging the partials that ``forest`` left, in Triton.

A partial is a sum of weighted values with its state: the largest score, in units of log 2, and the sum of weights below
it. One partial beside empty ones (sum 0) gives the bits that it would give alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramet.attention.kernels.forest import LN2, LOG2E, LOWEST, factor, rounded


@triton.jit
def merge_kernel(
    OUT, LSE, PARTIAL, STATES, SINKS, COUNTS, TOKENS, PARTS, out_scale,
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
            l0 = tl.load(STATES + at * 2, mask=i < count, other=LOWEST)
            t0 = tl.load(STATES + at * 2 + 1, mask=i < count, other=0.0)
            l1 = tl.load(STATES + (at + HEADS) * 2, mask=i + 1 < count, other=LOWEST)
            t1 = tl.load(STATES + (at + HEADS) * 2 + 1, mask=i + 1 < count, other=0.0)
            l2 = tl.load(STATES + (at + 2 * HEADS) * 2, mask=i + 2 < count, other=LOWEST)
            t2 = tl.load(STATES + (at + 2 * HEADS) * 2 + 1, mask=i + 2 < count, other=0.0)
            l3 = tl.load(STATES + (at + 3 * HEADS) * 2, mask=i + 3 < count, other=LOWEST)
            t3 = tl.load(STATES + (at + 3 * HEADS) * 2 + 1, mask=i + 3 < count, other=0.0)
            rows = PARTIAL + at[:, None] * D + d[None, :]
            o0 = tl.load(rows, mask=(i < count)[:, None] & inside, other=0.0)
            o1 = tl.load(rows + HEADS * D, mask=(i + 1 < count)[:, None] & inside, other=0.0)
            o2 = tl.load(rows + 2 * HEADS * D, mask=(i + 2 < count)[:, None] & inside, other=0.0)
            o3 = tl.load(rows + 3 * HEADS * D, mask=(i + 3 < count)[:, None] & inside, other=0.0)
            new_top = tl.maximum(top, tl.maximum(tl.maximum(l0, l1), tl.maximum(l2, l3)))
            keeps = tl.exp2(top - new_top)
            w0 = tl.exp2(l0 - new_top)
            w1 = tl.exp2(l1 - new_top)
            w2 = tl.exp2(l2 - new_top)
            w3 = tl.exp2(l3 - new_top)
            acc = acc * keeps[:, None] + o0 * w0[:, None] + o1 * w1[:, None] + o2 * w2[:, None] + o3 * w3[:, None]
            total = total * keeps + w0 * t0 + w1 * t1 + w2 * t2 + w3 * t3
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
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))
    o = acc / tl.where(some, total, 1.0)[:, None]
    if HAS_SINKS:  # far below the sink exp2 may overflow to inf: x / inf is 0
        sink = tl.load(SINKS + head, mask=writes, other=0.0)
        o = o / tl.where(some, 1.0 + tl.exp2((sink - lse) * LOG2E), 1.0)[:, None]
    o = o * factor(out_scale, OUT_SCALE_TENSOR)
    target = tl.load(TOKENS + token * 3, mask=writes, other=0).to(tl.int64) * HEADS + head
    tl.store(
        OUT + target[:, None] * D + d[None, :],
        rounded(o, OUT.dtype.element_ty, INTERPRET),
        mask=writes[:, None] & (d < D)[None, :],
    )
    if HAS_LSE:
        tl.store(LSE + target, lse, mask=writes)


@triton.jit
def merge_many_kernel(
    OUT, LSE, PARTIAL, STATES, SINKS, COUNTS, TOKENS, PARTS, out_scale,
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
                tops = tl.load(STATES + at * 2, mask=each < count, other=LOWEST)
                totals = tl.load(STATES + at * 2 + 1, mask=each < count, other=0.0)
                mask = (each < count)[:, None] & (d < D)[None, :]
                o = tl.load(PARTIAL + at[:, None] * D + d[None, :], mask=mask, other=0.0)
                new_top = tl.maximum(top, tl.max(tops, 0))
                keeps = tl.exp2(top - new_top)
                weights = tl.exp2(tops - new_top)
                acc = acc * keeps[:, None] + tl.sum(o * weights[:, None], 0)[None, :]
                total = total * keeps + tl.sum(weights * totals, 0)
                top = new_top
            one = tl.arange(0, 1)
            _finish(
                acc, total, top, token + one, head + one, one == 0, OUT, LSE, SINKS, TOKENS, out_scale,
                HEADS, D, BLOCK_D, HAS_SINKS, HAS_LSE, OUT_SCALE_TENSOR, INTERPRET,
            )  # fmt: skip
