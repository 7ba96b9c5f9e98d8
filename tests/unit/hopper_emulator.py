"""The Hopper kernel's reading of its records, in NumPy: ring of tiles, items, partial results, merge."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ramet.attention.backends.hopper_schedule import CAUSAL, DIRECT, ONCE, SHARED, TILE, Schedule, Shape

BOTH = 2


def ring_of(lists: np.ndarray, segments: np.ndarray) -> list[tuple[int, np.ndarray, int]]:
    """(set, segment, tile of the segment) in the order in which the producer puts them."""
    tiles = [
        [(kind, segments[at], tile) for at in range(*lists[2 * kind : 2 * kind + 2]) for tile in range(segments[at][5])]
        for kind in range(3)
    ]
    own, paired = [], min(len(tiles[0]), len(tiles[1]))
    for at in range(paired):
        own += [tiles[0][at], tiles[1][at]]
    own += tiles[0][paired:] + tiles[1][paired:]
    return own + tiles[BOTH] if lists[10] else tiles[BOTH] + own


def check_first(lists: np.ndarray, segments: np.ndarray, pages: np.ndarray, shape: Shape) -> None:
    """Each list's first segment and its pages are what the record copies."""
    for kind in range(3):
        begin, end = lists[2 * kind : 2 * kind + 2]
        if begin < end:
            segment = segments[begin]
            np.testing.assert_array_equal(lists[16 + 8 * kind : 24 + 8 * kind], segment)
            for box in range(TILE // shape.box):
                slot = segment[1] + box * shape.box
                if slot < segment[3]:
                    assert lists[40 + 8 * kind + box] == pages[segment[0] + slot // shape.page_size]


def keys_of(segment: np.ndarray, tile: int, pages: np.ndarray, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pool rows (page * page_size + offset) and positions of a tile's valid tokens."""
    base = segment[1] + tile * TILE
    slot = np.arange(max(base, segment[2]), min(base + TILE, segment[3]))
    return pages[segment[0] + slot // page_size].astype(np.int64) * page_size + slot % page_size, segment[
        7
    ] + slot - segment[1]


def run(
    plan: Schedule, shape: Shape, pages: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Output [tokens, heads, dim] and lse [tokens, heads]; k and v are [slots, kv heads, dim]."""
    tokens, heads, dim = q.shape
    group = shape.group_size
    stride = plan.partial_rows
    lists, segments, items = plan.repeat(shape, stride)
    out, lse = np.full(q.shape, np.nan), np.full((tokens, heads), np.nan)
    partial = np.full((stride * shape.repeats, dim), np.nan)
    partial_lse = np.full(stride * shape.repeats, np.nan)
    for cta in lists:
        check_first(cta, segments, pages, shape)
        ring = ring_of(cta, segments)
        used = np.zeros((len(ring), 2), int)
        readers: list[list[list[int]]] = [[], []]
        for side in range(2):
            before = -1
            for item in items[cta[6 + 2 * side] : cta[7 + 2 * side]]:
                at, rows, places = item[0], [], []
                readers[side].append([])
                for tile in range(item[1]):
                    kind, segment, nth = ring[at]
                    assert at > before and kind == (BOTH if item[5] & SHARED else side)
                    assert segment[4] & (ONCE - 1) == item[4]
                    used[at, side] += 1
                    readers[side][-1].append(int(at))
                    row, place = keys_of(segment, nth, pages, shape.page_size)
                    rows.append(row)
                    places.append(place)
                    before = at
                    at += 2 if tile < item[7] else 1
                _attend(
                    item,
                    (np.concatenate(rows), np.concatenate(places)),
                    plan,
                    (q, k, v, scale, group),
                    (out, lse, partial, partial_lse),
                )
        for (kind, _, _), count in zip(ring, used, strict=True):
            assert tuple(count) == ((1, 1) if kind == BOTH else (kind == 0, kind == 1))
        for stages in (3, 6):  # of head_dim 128 and 64
            check_progress(ring, readers, stages)
    _merge(plan, shape, stride, (out, lse, partial, partial_lse))
    return out, lse


def _attend(item, keys, plan, inputs, outputs) -> None:  # type: ignore[no-untyped-def]
    q, k, v, scale, group = inputs
    out, lse, partial, partial_lse = outputs
    rows, places = keys
    for local in range(item[3]):
        token = item[2] + local
        seen = places < plan.token_end[token] if item[5] & CAUSAL else np.ones(len(places), bool)
        for g in range(group):
            head = item[4] * group + g
            scores = k[rows, item[4]] @ q[token, head] * scale
            scores = np.where(seen, scores, -np.inf)
            top = scores.max()
            weights = np.exp(scores - top) if top > -np.inf else np.zeros_like(scores)
            total = weights.sum()
            value = weights @ v[rows, item[4]] / total if total else np.zeros(q.shape[2])
            log = top + np.log(total) if total else -np.inf
            if item[5] & DIRECT:
                assert np.isnan(lse[token, head])
                out[token, head], lse[token, head] = value, log
            else:
                at = item[6] + local * group + g
                assert np.isnan(partial_lse[at])
                partial[at], partial_lse[at] = value, log


def _merge(plan, shape, stride, outputs) -> None:  # type: ignore[no-untyped-def]
    out, lse, partial, partial_lse = outputs
    for token in range(out.shape[0]):
        for head in range(out.shape[1]):
            kv = head // shape.group_size
            place = token * shape.heads + kv % shape.heads
            entries = plan.merge_entries[plan.merge_begin[place] : plan.merge_begin[place + 1]]
            if len(entries):
                at = entries + kv // shape.heads * stride + head % shape.group_size
                assert np.isnan(lse[token, head])
                log = partial_lse[at]
                assert not np.isnan(log).any()
                lse[token, head] = np.logaddexp.reduce(log)
                out[token, head] = np.exp(log - lse[token, head]) @ partial[at]


def check_progress(ring: list[tuple[int, np.ndarray, int]], readers: list[list[list[int]]], stages: int) -> None:
    """Run producer and warpgroups, each waiting as the kernel does, until all are done: none may wait for ever.

    ``readers`` holds each warpgroup's items, each the ring numbers of its tiles.
    """
    loads = [(what, tile) for tile in range(len(ring)) for what in "kv"]
    products: list[list[list[tuple[str, int]]]] = [[], []]  # loads that a step waits for; it then frees all but K's use
    frees: list[list[list[tuple[str, int]]]] = [[], []]
    for side, items in enumerate(readers):
        for tiles in items:
            products[side].append([("k", tiles[0])])
            frees[side].append([("k", tiles[0])])
            for before, tile in pairwise(tiles):
                products[side].append([("k", tile), ("v", before)])
                frees[side].append([("k", tile), ("v", before)])
            products[side].append([("v", tiles[-1])])
            frees[side].append([("v", tiles[-1])])
    arrived: set[tuple[str, int]] = set()
    left = {(what, tile): 2 if ring[tile][0] == BOTH else 1 for what, tile in loads}
    at, put = [0, 0], 0
    while put < len(loads) or any(at[side] < len(products[side]) for side in range(2)):
        moved = False
        if put < len(loads):
            what, tile = loads[put]
            if tile < stages or left[what, tile - stages] == 0:
                arrived.add(loads[put])
                put, moved = put + 1, True
        for side in range(2):
            if at[side] < len(products[side]) and arrived.issuperset(products[side][at[side]]):
                for freed in frees[side][at[side]]:
                    left[freed] -= 1
                at[side], moved = at[side] + 1, True
        assert moved, "producer and warpgroups wait for one another"
    assert not any(left.values())
