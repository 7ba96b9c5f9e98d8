"""Attention over a forest, in Triton: shared nodes and tails in one kernel, which leaves partials for ``merge``.

A program takes one tile (query vectors of one KV head: query tokens times the heads of the GQA group, packed) and the
keys of its segments, in blocks. What a tile is, comes from ``ramet.attention.tiles``; the arrays are described there.

- A key's *place* is its KV slot counted through the page lists, one page after another: ``place = position + base``.
- Blocks begin at multiples of BLOCK_N *places*, so that a block lies in one page where pages are long enough. In
  deterministic mode they begin at multiples of BLOCK_N *positions*, whatever nodes the positions lie in.
- Keys that no query of the tile may see are not loaded: what lies there may be NaN, or an evicted page.
- ``INTERPRET``: the interpreter computes bf16 on raw bits, so tiles are widened to float32 as soon as they are loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)  # below every score; finite, so that differences of maxima are never NaN
FAR = tl.constexpr(2147483647)


@triton.jit
def rounded(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """``x`` (float32) in ``dtype``, rounded to nearest even. (The interpreter would truncate to bf16.)"""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        odd = (bits >> 16) & 1
        up = (bits + (odd + 32767)) & 4294901760
        x = tl.where(x == x, up.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def _page(PAGES, place, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of the block that begins at ``place``: one where a page holds whole blocks, else one per key."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(PAGES + place // PAGE, mask=place < end, other=0)
    else:
        places = place + tl.arange(0, BLOCK_N)
        page = tl.load(PAGES + places // PAGE, mask=places < end, other=0)
    return page


@triton.jit
def _rows(POOL, offset, keep, KEEP_ALL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRET: tl.constexpr):
    """Rows of K or V, [BLOCK_N, BLOCK_D]; 0 where a key is not kept and behind the head."""
    d = tl.arange(0, BLOCK_D)
    pointers = POOL + offset[:, None] + d[None, :]
    if KEEP_ALL and D == BLOCK_D:
        rows = tl.load(pointers)
    elif D == BLOCK_D:
        rows = tl.load(pointers, mask=keep[:, None], other=0.0)
    else:
        rows = tl.load(pointers, mask=keep[:, None] & (d < D)[None, :], other=0.0)
    if INTERPRET:
        rows = rows.to(tl.float32)
    return rows


@triton.jit
def _block(
    q, top, total, acc, K, V, page, place, position, keep, last, first, scale,
    k_strides, v_strides, softcap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One block of keys: scores, their softmax so far, values. ``last`` and ``first`` bound what each query sees."""
    slot = (place % PAGE).to(tl.int64)
    wide = page.to(tl.int64)
    k = _rows(K, wide * k_strides[0] + slot * k_strides[1], keep, not MASKED, D, BLOCK_D, INTERPRET)
    v = _rows(V, wide * v_strides[0] + slot * v_strides[1], keep, not MASKED, D, BLOCK_D, INTERPRET)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP:  # tanh, from the logistic function
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * LOG2E
    if MASKED:
        seen = keep[None, :] & (position[None, :] <= last[:, None])
        if WINDOW >= 0:
            seen = seen & (position[None, :] >= first[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    keeps = tl.exp2(top - new_top)
    total = total * keeps + tl.sum(weights, 1)
    acc = acc * keeps[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _by_places(
    q, top, total, acc, K, V, PAGES, low, high, base, last, first, all_last, all_first, scale,
    k_strides, v_strides, softcap,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Positions [low, high) of one segment: first the blocks that every query sees whole, then those at the edges."""
    lanes = tl.arange(0, BLOCK_N)
    end = high + base
    begin = (low + base) // BLOCK_N * BLOCK_N
    plain = tl.cdiv(tl.maximum(low, all_first) + base, BLOCK_N) * BLOCK_N
    edge = (tl.minimum(high, all_last + 1) + base) // BLOCK_N * BLOCK_N
    if edge < plain:
        plain = begin
        edge = begin
    page = _page(PAGES, plain, edge, PAGE, BLOCK_N)
    for block in tl.range(plain, edge, BLOCK_N, num_stages=STAGES):
        ahead = _page(PAGES, block + BLOCK_N, edge, PAGE, BLOCK_N)
        place = block + lanes
        top, total, acc = _block(
            q, top, total, acc, K, V, page, place, place - base, place >= 0, last, first, scale,
            k_strides, v_strides, softcap,
            False, WINDOW, SOFTCAP, PAGE, D, BLOCK_D, INTERPRET,
        )  # fmt: skip
        page = ahead
    left = (plain - begin) // BLOCK_N
    for i in tl.range(0, left + tl.cdiv(end - edge, BLOCK_N), 1, num_stages=1):
        block = tl.where(i < left, begin + i * BLOCK_N, edge + (i - left) * BLOCK_N)
        place = block + lanes
        position = place - base
        keep = (position >= low) & (position < high)
        pages = tl.load(PAGES + place // PAGE, mask=keep, other=0)
        top, total, acc = _block(
            q, top, total, acc, K, V, pages, place, position, keep, last, first, scale,
            k_strides, v_strides, softcap,
            True, WINDOW, SOFTCAP, PAGE, D, BLOCK_D, INTERPRET,
        )  # fmt: skip
    return top, total, acc


@triton.jit
def _by_positions(
    q, top, total, acc, K, V, PAGES, SEGMENTS, segment_begin, segment_end, low, high, last, first, scale,
    k_strides, v_strides, softcap,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Positions [low, high), block by block from a multiple of BLOCK_N on, through as many segments as they touch."""
    lanes = tl.arange(0, BLOCK_N)
    for block in tl.range(low // BLOCK_N * BLOCK_N, high, BLOCK_N, num_stages=STAGES):
        position = block + lanes
        place = tl.full([BLOCK_N], -1, tl.int32)
        for segment in range(segment_begin, segment_end):
            start = tl.load(SEGMENTS + segment * 3)
            stop = tl.load(SEGMENTS + segment * 3 + 1)
            base = tl.load(SEGMENTS + segment * 3 + 2)
            place = tl.where((position >= start) & (position < stop), position + base, place)
        keep = (place >= 0) & (position >= low) & (position < high)
        place = tl.where(keep, place, 0)
        page = tl.load(PAGES + place // PAGE, mask=keep, other=0)
        top, total, acc = _block(
            q, top, total, acc, K, V, page, place, position, keep, last, first, scale,
            k_strides, v_strides, softcap,
            True, WINDOW, SOFTCAP, PAGE, D, BLOCK_D, INTERPRET,
        )  # fmt: skip
    return top, total, acc


@triton.jit
def factor(value, IS_TENSOR: tl.constexpr):
    """A scale, which may lie on the device."""
    if IS_TENSOR:
        value = tl.load(value)
    return value


@triton.jit
def _queries(
    vector, real, kv_head, TOKENS, ROW_END, SEQ_LENS,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, HAS_SEQ_LENS: tl.constexpr,
):  # fmt: skip
    """Of each query vector: its token in q, its head, and the first and last position that it sees."""
    token = vector // GROUP
    head = kv_head * GROUP + vector % GROUP
    q_token = tl.load(TOKENS + token * 3, mask=real, other=0)
    row = tl.load(TOKENS + token * 3 + 1, mask=real, other=0)
    back = tl.load(TOKENS + token * 3 + 2, mask=real, other=0)
    length = tl.load(ROW_END + row, mask=real, other=0)
    if HAS_SEQ_LENS:
        length = tl.minimum(length, tl.load(SEQ_LENS + row, mask=real, other=0))
    position = length - 1 - back
    last = tl.where(real, position if CAUSAL else length - 1, -1)
    first = tl.where(real, position - WINDOW if WINDOW >= 0 else 0, FAR)
    return token, q_token, head, first, last


@triton.jit
def _write(
    top, total, acc, real, token, q_token, head, part, OUT, LSE, PARTIAL, STATES, SINKS, PARTS, out_scale,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    OUT_SCALE_TENSOR: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Write the only partial of a token as its output, and others for the merge.

    Those are not divided yet and have the largest score and the sum of weights beside them: a log-sum-exp in float32
    would lose the sum where scores are large.
    """
    d = tl.arange(0, BLOCK_D)
    inside = (d < D)[None, :]
    some = total > 0.0  # a query that sees no key here: output 0, lse -inf
    o = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))
    begin = tl.load(PARTS + token, mask=real, other=0)
    alone = tl.load(PARTS + token + 1, mask=real, other=0) - begin == 1
    merges = real & (alone == 0)
    place = (begin + part).to(tl.int64) * HEADS + head
    tl.store(PARTIAL + place[:, None] * D + d[None, :], acc, mask=merges[:, None] & inside)
    tl.store(STATES + place * 2, top, mask=merges)
    tl.store(STATES + place * 2 + 1, total, mask=merges)
    writes = real & alone
    if HAS_SINKS:
        sink = tl.load(SINKS + head, mask=real, other=0.0)
        o = o / tl.where(some, 1.0 + tl.exp2((sink - lse) * LOG2E), 1.0)[:, None]
    o = o * factor(out_scale, OUT_SCALE_TENSOR)
    target = q_token.to(tl.int64) * HEADS + head
    o = rounded(o, OUT.dtype.element_ty, INTERPRET)
    tl.store(OUT + target[:, None] * D + d[None, :], o, mask=writes[:, None] & inside)
    if HAS_LSE:
        tl.store(LSE + target, lse, mask=writes)


@triton.jit
def _tile(
    tile, kv_head,
    Q, K, V, OUT, LSE, PARTIAL, STATES, SINKS, TILES, SEGMENTS, PAGES, TOKENS, PARTS, ROW_END, SEQ_LENS,
    scale, out_scale, softcap, q_strides, k_strides, v_strides,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, HAS_SEQ_LENS: tl.constexpr,
    SCALE_TENSOR: tl.constexpr, OUT_SCALE_TENSOR: tl.constexpr, DETERMINISTIC: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    record = TILES + tile * 8
    segment_begin = tl.load(record + 2)
    segment_end = tl.load(record + 3)
    vector = tl.load(record) + tl.arange(0, BLOCK_M)
    real = vector < tl.load(record + 1)
    token, q_token, head, first, last = _queries(
        vector, real, kv_head, TOKENS, ROW_END, SEQ_LENS, GROUP, WINDOW, CAUSAL, HAS_SEQ_LENS
    )
    low = tl.load(record + 4)
    high = tl.minimum(tl.load(record + 5), tl.max(last, 0) + 1)
    if WINDOW >= 0:
        low = tl.maximum(low, tl.min(first, 0))
    d = tl.arange(0, BLOCK_D)
    q_offset = q_token.to(tl.int64) * q_strides[0] + head * q_strides[1]
    q = tl.load(Q + q_offset[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    if INTERPRET:
        q = q.to(tl.float32)
    times = factor(scale, SCALE_TENSOR)
    if not SOFTCAP:
        times = times * LOG2E
    k_head = K + kv_head * k_strides[2]
    v_head = V + kv_head * v_strides[2]
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if DETERMINISTIC:
        top, total, acc = _by_positions(
            q, top, total, acc, k_head, v_head, PAGES, SEGMENTS, segment_begin, segment_end, low, high, last, first,
            times, k_strides, v_strides, softcap,
            WINDOW, SOFTCAP, PAGE, D, BLOCK_D, BLOCK_N, STAGES, INTERPRET,
        )  # fmt: skip
    else:
        all_last = tl.min(tl.where(real, last, FAR), 0)
        all_first = tl.max(tl.where(real, first, 0), 0)
        for segment in range(segment_begin, segment_end):
            start = tl.load(SEGMENTS + segment * 3)
            stop = tl.load(SEGMENTS + segment * 3 + 1)
            base = tl.load(SEGMENTS + segment * 3 + 2)
            seen_low = tl.maximum(low, start)
            seen_high = tl.minimum(high, stop)
            if seen_low < seen_high:
                top, total, acc = _by_places(
                    q, top, total, acc, k_head, v_head, PAGES, seen_low, seen_high, base, last, first,
                    all_last, all_first, times, k_strides, v_strides, softcap,
                    WINDOW, SOFTCAP, PAGE, D, BLOCK_D, BLOCK_N, STAGES, INTERPRET,
                )  # fmt: skip
    _write(
        top, total, acc, real, token, q_token, head, tl.load(record + 6), OUT, LSE, PARTIAL, STATES, SINKS,
        PARTS, out_scale, HEADS, D, BLOCK_D, HAS_SINKS, HAS_LSE, OUT_SCALE_TENSOR, INTERPRET,
    )  # fmt: skip


@triton.jit
def forest_kernel(
    Q, K, V, OUT, LSE, PARTIAL, STATES, SINKS, COUNTS, TILES, SEGMENTS, PAGES, TOKENS, PARTS, ROW_END, SEQ_LENS,
    scale, out_scale, softcap,
    q_stride_token, q_stride_head, k_stride_page, k_stride_slot, k_stride_head,
    v_stride_page, v_stride_slot, v_stride_head,
    LARGE_M: tl.constexpr, SMALL_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr, HAS_SEQ_LENS: tl.constexpr, SCALE_TENSOR: tl.constexpr, OUT_SCALE_TENSOR: tl.constexpr,
    DETERMINISTIC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program p: tile p // KV heads of KV head p % KV heads. Large tiles come first; programs behind the last exit."""
    tile = tl.program_id(0) // (HEADS // GROUP)
    kv_head = tl.program_id(0) % (HEADS // GROUP)
    large = tl.load(COUNTS)
    count = tl.load(COUNTS + 1)
    q_strides = (q_stride_token, q_stride_head)
    k_strides = (k_stride_page, k_stride_slot, k_stride_head)
    v_strides = (v_stride_page, v_stride_slot, v_stride_head)
    if tile < count:
        if tile < large:
            _tile(
                tile, kv_head, Q, K, V, OUT, LSE, PARTIAL, STATES, SINKS, TILES, SEGMENTS, PAGES, TOKENS, PARTS,
                ROW_END, SEQ_LENS, scale, out_scale, softcap, q_strides, k_strides, v_strides,
                LARGE_M, BLOCK_N, STAGES, HEADS, GROUP, D, BLOCK_D, PAGE, WINDOW, SOFTCAP, CAUSAL, HAS_SINKS, HAS_LSE,
                HAS_SEQ_LENS, SCALE_TENSOR, OUT_SCALE_TENSOR, DETERMINISTIC, INTERPRET,
            )  # fmt: skip
        elif SMALL_M < LARGE_M:
            _tile(
                tile, kv_head, Q, K, V, OUT, LSE, PARTIAL, STATES, SINKS, TILES, SEGMENTS, PAGES, TOKENS, PARTS,
                ROW_END, SEQ_LENS, scale, out_scale, softcap, q_strides, k_strides, v_strides,
                SMALL_M, BLOCK_N, STAGES, HEADS, GROUP, D, BLOCK_D, PAGE, WINDOW, SOFTCAP, CAUSAL, HAS_SINKS, HAS_LSE,
                HAS_SEQ_LENS, SCALE_TENSOR, OUT_SCALE_TENSOR, DETERMINISTIC, INTERPRET,
            )  # fmt: skip
