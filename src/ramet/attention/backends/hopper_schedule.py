"""The schedule of the Hopper kernel: what each CTA streams and multiplies, as flat int32 records. NumPy only.

Everything that is read becomes *strips* (a node's tokens in tiles of 128), *sources* (strips that some query tokens
read) and *jobs* (at most 128 packed query rows of a source; more than 64 take both warpgroups of a CTA). Jobs of one
warpgroup lie on one line, cut into equal parts for all warpgroups; jobs of two lie on another, cut into whatever time
each CTA has left. KV heads are planned a few at a time and the plan repeated, so that all SMs take part.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from ramet.attention.work import WorkList

TILE = 128
SHARED_TILE = 1.25
"""Cost of a tile that both warpgroups multiply (the unit is a tile of one warpgroup, which memory feeds)."""
ITEM = 0.5
"""Cost of beginning and ending an item."""
SNAP = 2
"""A cut moves to the end of a job that is so many tiles away: a partial result saved is worth an uneven part."""
ONCE = 1 << 16
SHARED, DIRECT, CAUSAL = 1, 2, 4


@dataclass(frozen=True)
class Shape:
    """What the records depend on besides the work.

    Parameters
    ----------
    num_kv_heads, group_size, page_size : int
    sms : int
        CTAs of the grid at most.

    Examples
    --------
    >>> shape = Shape(num_kv_heads=28, group_size=1, page_size=16, sms=132)
    >>> shape.heads, shape.repeats, shape.ctas
    (2, 14, 9)
    """

    num_kv_heads: int
    group_size: int
    page_size: int
    sms: int = 132

    @property
    def block(self) -> int:
        """Query tokens of one warpgroup."""
        return 64 // self.group_size

    @property
    def box(self) -> int:
        """Tokens of one copy."""
        return gcd(self.page_size, TILE)

    @property
    def heads(self) -> int:
        """KV heads that are planned together: the fewest with which nearly all SMs take part."""
        for heads in range(1, self.num_kv_heads + 1):
            if self.num_kv_heads % heads == 0:
                repeats = self.num_kv_heads // heads
                if self.sms // repeats * repeats >= 0.95 * self.sms:
                    return heads
        return self.num_kv_heads

    @property
    def repeats(self) -> int:
        return self.num_kv_heads // self.heads

    @property
    def ctas(self) -> int:
        """CTAs of one repetition."""
        return self.sms // self.repeats


@dataclass(frozen=True)
class Schedule:
    """The kernel's records, for one repetition; :meth:`repeat` makes those of all.

    Attributes
    ----------
    lists : int32 [ctas, 64]
    segments : int32 [segments, 8]
    items : int32 [items, 8]
    token_end : int32 [tokens]
        Empty where no item needs it.
    merge_begin : int32 [tokens * heads + 1]
        Offsets into ``merge_entries`` of each token and planned head; equal ones: there is nothing to merge.
    merge_entries : int32
        First row of each partial result.
    partial_rows : int
    """

    lists: np.ndarray
    segments: np.ndarray
    items: np.ndarray
    token_end: np.ndarray
    merge_begin: np.ndarray
    merge_entries: np.ndarray
    partial_rows: int

    def repeat(self, shape: Shape, stride: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lists, segments and items of all KV heads; ``stride``: partial rows from one repetition to the next."""
        number = np.arange(shape.repeats, dtype=np.int32)[:, None]
        lists = np.repeat(self.lists[None], shape.repeats, axis=0)
        lists[:, :, 0:6] += (number * len(self.segments))[:, :, None]
        lists[:, :, 6:10] += (number * len(self.items))[:, :, None]
        lists[:, :, 20:40:8] += (number * shape.heads)[:, :, None]
        segments = np.repeat(self.segments[None], shape.repeats, axis=0)
        segments[:, :, 4] += number * shape.heads
        items = np.repeat(self.items[None], shape.repeats, axis=0)
        items[:, :, 4] += number * shape.heads
        items[:, :, 6] += number * stride
        return lists.reshape(-1, 64), segments.reshape(-1, 8), items.reshape(-1, 8)


@dataclass(frozen=True)
class _Sources:
    """Strips [S] and sources [N]; source i is the strips whose tiles are [offset, offset + tiles) of all tiles."""

    strip_node: np.ndarray
    strip_first: np.ndarray  # slot of the first token
    strip_end: np.ndarray  # slot behind the last
    strip_slot: np.ndarray  # slot of the first tile
    strip_old: np.ndarray  # tiles that were written before this step
    strip_tile_end: np.ndarray  # running sum of tiles
    offset: np.ndarray
    tiles: np.ndarray
    token: np.ndarray
    tokens: np.ndarray
    causal: np.ndarray
    once: np.ndarray


@dataclass(frozen=True)
class _Jobs:
    source: np.ndarray
    token: np.ndarray
    tokens: np.ndarray
    head: np.ndarray
    tiles: np.ndarray


@dataclass(frozen=True)
class _Pieces:
    """Consecutive tiles [begin, end) of a job, for a part of the machine (a warpgroup, or a CTA); parts ascend."""

    job: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    part: np.ndarray

    @property
    def tiles(self) -> np.ndarray:
        return self.end - self.begin

    def before(self) -> np.ndarray:
        """Tiles of the same part in front of each piece."""
        sums = np.cumsum(self.tiles) - self.tiles
        return sums - sums[np.searchsorted(self.part, self.part, "left")] if len(sums) else sums


@dataclass(frozen=True)
class _Layout:
    """What of a schedule stays while rows grow within their last tiles."""

    key: tuple[np.ndarray, ...]
    lists: np.ndarray  # without the copies of first segments
    items: np.ndarray  # without CAUSAL, in the kernel's order
    item_source: np.ndarray
    merge_begin: np.ndarray
    merge_entries: np.ndarray
    partial_rows: int
    strip: np.ndarray  # of each segment
    first: np.ndarray  # its first tile in the strip
    tiles: np.ndarray
    head: np.ndarray  # with ONCE
    bounds: np.ndarray  # of each CTA's three lists of segments


class Scheduler:
    """Spreads one work list after another over the CTAs; who does what is kept while no row needs another tile.

    Examples
    --------
    >>> from ramet.attention.build import build_work
    >>> from ramet.attention.problem import SharePolicy
    >>> from ramet.attention.types import ForestArrays
    >>> ints = lambda *values: np.array(values, dtype=np.int32)
    >>> forest = ForestArrays(
    ...     ints(0, 1), ints(0), ints(-1), ints(0), ints(200), ints(0), ints(0, 2), ints(7, 3))
    >>> scheduler = Scheduler(Shape(num_kv_heads=1, group_size=4, page_size=128, sms=2))
    >>> plan = scheduler.schedule(build_work(forest, SharePolicy(0)))
    >>> int(plan.segments[:, 5].sum())
    2
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._layout: _Layout | None = None

    def schedule(self, work: WorkList) -> Schedule:
        """The records of a work list."""
        sources = _sources(work, self.shape)
        key = (sources.strip_tile_end, sources.offset, sources.tiles, sources.token, sources.tokens, sources.once)
        layout = self._layout
        if layout is None or not all(map(np.array_equal, key, layout.key)):
            layout = self._layout = _layout(sources, self.shape, key)
        lists, items = layout.lists.copy(), layout.items
        segments = _segments(work, sources, layout)
        _copy_first(lists, segments, layout.bounds, work.forest.node_pages, self.shape)
        token_end = np.empty(0, np.int32)
        if sources.causal.any():
            items, token_end = items.copy(), _token_ends(work)
            items[:, 5] += CAUSAL * sources.causal[layout.item_source]
        return Schedule(
            lists, segments, items, token_end, layout.merge_begin, layout.merge_entries, layout.partial_rows
        )


def _layout(sources: _Sources, shape: Shape, key: tuple[np.ndarray, ...]) -> _Layout:
    jobs = _jobs(sources, shape)
    ctas = shape.ctas
    wide = jobs.tokens > shape.block
    narrow = _cut(np.flatnonzero(~wide), jobs.tiles, np.ones(2 * ctas))
    own = np.bincount(narrow.part, narrow.tiles, 2 * ctas).astype(np.int64).reshape(2, ctas)
    busy = own.sum(axis=0) + ITEM * np.bincount(narrow.part % ctas, minlength=ctas)
    both = np.flatnonzero(wide)
    shared = _cut(both, jobs.tiles, _time_left(busy, SHARED_TILE * float(jobs.tiles[both].sum())))
    lists = np.zeros((ctas, 64), np.int32)
    lists[:, 10] = np.arange(ctas) & 1
    items, order = _items(jobs, narrow, shared, own, lists, shape)
    tokens = int((jobs.token + jobs.tokens).max(initial=0))
    begin, entries, direct, items[:, 6], rows = _partials(items, shape, tokens)
    items[:, 5] += DIRECT * direct
    source = jobs.source[np.concatenate([narrow.job, shared.job, shared.job])]
    return _Layout(
        key, lists, items[order], source[order], begin, entries, rows, *_strips(sources, jobs, narrow, shared, lists)
    )


def _sources(work: WorkList, shape: Shape) -> _Sources:
    forest = work.forest
    old_row = work.end - work.q_len  # positions below it were written in earlier steps
    length = forest.node_end - forest.node_start
    kept = length[work.tail_node] > 0
    sums = np.append(0, np.cumsum(kept))
    per_row = sums[work.tail_indptr[1:]] - sums[work.tail_indptr[:-1]]
    tail_row = np.flatnonzero(per_row)
    per_row = per_row[tail_row]

    node = np.concatenate([work.item_node, work.tail_node[kept]])
    old = np.concatenate(
        [_lowest(old_row, work.item_row_begin, work.item_row_end), np.repeat(old_row[tail_row], per_row)]
    )
    first = forest.node_first_slot[node].astype(np.int64)
    end = first + length[node]
    slot = first // shape.box * shape.box
    tiles = -(-(end - slot) // TILE)
    tile_end = np.cumsum(tiles)
    old_end = first + old - forest.node_start[node]

    item, begin_row, end_row = _runs(work)
    strip = np.concatenate([item, work.num_items + np.cumsum(per_row) - per_row])
    last = np.concatenate([item, work.num_items + np.cumsum(per_row) - 1])
    begins = work.q_begin[begin_row]
    ends = work.q_begin[end_row - 1] + work.q_len[end_row - 1]
    return _Sources(
        strip_node=node,
        strip_first=first,
        strip_end=end,
        strip_slot=slot,
        strip_old=np.where(old_end >= end, tiles, np.maximum(old_end - slot, 0) // TILE),
        strip_tile_end=tile_end,
        offset=tile_end[strip] - tiles[strip],
        tiles=tile_end[last] - tile_end[strip] + tiles[strip],
        token=np.concatenate([begins, work.q_begin[tail_row]]),
        tokens=np.concatenate([ends - begins, work.q_len[tail_row]]),
        causal=forest.node_end[node[last]] > old[last] + 1,
        once=np.arange(len(strip)) >= len(item),
    )


def _lowest(values: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Minimum of ``values[begin:end]`` for each pair."""
    if not len(begin):
        return np.zeros(0, np.int64)
    edges = np.stack([begin, end], axis=1).ravel()
    return np.minimum.reduceat(np.append(values, np.iinfo(np.int64).max), edges)[::2]


def _runs(work: WorkList) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Items cut where their rows' query tokens are not consecutive: item, first row, row behind the last."""
    item, begin, end = np.arange(work.num_items), work.item_row_begin, work.item_row_end
    breaks = np.flatnonzero(work.q_begin[1:] != (work.q_begin + work.q_len)[:-1]) + 1
    if not len(breaks) or not len(item):
        return item, begin, end
    low = np.searchsorted(breaks, begin, "right")
    item, nth, count = _expand(np.searchsorted(breaks, end, "left") - low + 1)
    padded = np.append(breaks, 0)
    at = low[item] + nth
    first = np.where(nth == 0, begin[item], padded[at - 1])
    return item, first, np.where(nth + 1 == count[item], end[item], padded[at])


def _expand(count: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``count[i]`` copies of each i, the number of the copy, and the counts."""
    owner = np.repeat(np.arange(len(count)), count)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count), count


def _jobs(sources: _Sources, shape: Shape) -> _Jobs:
    size = 2 * shape.block
    source, nth, _ = _expand(-(-sources.tokens // size))
    token = sources.token[source] + nth * size
    tokens = np.minimum(sources.tokens[source] - nth * size, size)
    head = np.repeat(np.arange(shape.heads), len(source))
    source, token, tokens = (np.tile(x, shape.heads) for x in (source, token, tokens))
    return _Jobs(source, token, tokens, head, sources.tiles[source])


def _time_left(busy: np.ndarray, work: float) -> np.ndarray:
    """How to spread more work so that all end together, the busiest perhaps later."""
    level = ((work + np.cumsum(np.sort(busy))) / np.arange(1, len(busy) + 1)).min()
    return np.maximum(level - busy, 0.0)


def _cut(jobs: np.ndarray, tiles: np.ndarray, shares: np.ndarray) -> _Pieces:
    """Cut a line of jobs into parts of the given shares."""
    length = tiles[jobs]
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    if not total:
        empty = np.zeros(0, np.int64)
        return _Pieces(empty, empty, empty, empty)
    sums = np.cumsum(shares)
    cuts = np.rint(sums[:-1] * (total / sums[-1])).astype(np.int64)
    job = np.minimum(np.searchsorted(ends, cuts, "right"), len(ends) - 1)
    upper = ends[job]
    lower = upper - length[job]
    snap = max(1.0, min(SNAP, 0.2 * total / np.count_nonzero(shares)))
    cuts = np.where(cuts - lower <= snap, lower, np.where(upper - cuts <= snap, upper, cuts))
    marks = np.unique(np.concatenate([[0], ends, cuts]))
    begin, end = marks[:-1], marks[1:]
    job = np.searchsorted(ends, begin, "right")
    start = (ends - length)[job]
    return _Pieces(jobs[job], begin - start, end - start, np.searchsorted(cuts, begin, "right"))


def _bounds(key: np.ndarray, count: int) -> np.ndarray:
    """[begin, end) of each key among sorted keys."""
    end = np.cumsum(np.bincount(key, minlength=count))
    return np.stack([np.append(0, end[:-1]), end], axis=1)


def _items(
    jobs: _Jobs, narrow: _Pieces, shared: _Pieces, own: np.ndarray, lists: np.ndarray, shape: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """Items without their partial rows, and the order in which the kernel wants them; fills each CTA's bounds."""
    ctas, few, more = shape.ctas, len(narrow.job), len(shared.job)
    split_first = lists[:, 10]
    of_cta = np.bincount(shared.part, shared.tiles, ctas).astype(np.int64)
    cta, side = narrow.part % ctas, narrow.part // ctas
    # The two lists of own tiles are dealt out in turn while both last: that many times the ring holds one of each.
    turns = np.minimum(own[0], own[1])[cta]
    at = narrow.before()
    ring = np.where(at < turns, 2 * at + side, turns + at) + np.where(split_first, 0, of_cta)[cta]
    shared_ring = shared.before() + np.where(split_first, own.sum(axis=0), 0)[shared.part]

    items = np.zeros((few + 2 * more, 8), np.int32)
    job = np.concatenate([narrow.job, shared.job, shared.job])
    second = np.arange(len(job)) >= few + more
    items[:, 0] = np.concatenate([ring, shared_ring, shared_ring])
    items[:, 1] = np.concatenate([narrow.tiles, shared.tiles, shared.tiles])
    items[:, 2] = jobs.token[job] + shape.block * second
    items[:, 3] = np.where(second, jobs.tokens[job] - shape.block, np.minimum(jobs.tokens[job], shape.block))
    items[:, 4] = jobs.head[job]
    items[few:, 5] = SHARED
    items[:few, 7] = np.clip(turns - side - at, 0, narrow.tiles)
    cta = np.concatenate([cta, shared.part, shared.part])
    side = np.concatenate([side, np.zeros(more, np.int64), np.ones(more, np.int64)])
    lists[:, 6:10] = _bounds(cta * 2 + side, 2 * ctas).reshape(ctas, 4)
    later = np.where(np.arange(len(job)) < few, 1 - split_first[cta], split_first[cta])
    return items, np.argsort((cta * 2 + side) * 2 + later, kind="stable")


def _partials(
    items: np.ndarray, shape: Shape, num_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Who writes partial results and where: merge lists, direct items, each item's first row, and the rows in all."""
    token, tokens, head = (items[:, i].astype(np.int64) for i in (2, 3, 4))
    item, local, _ = _expand(tokens)
    place = (token[item] + local) * shape.heads + head[item]
    places = num_tokens * shape.heads
    count = np.bincount(place, minlength=places)
    start = np.cumsum(tokens) - tokens
    direct = np.maximum.reduceat(count[place], start) == 1 if len(items) else np.zeros(0, bool)
    rows = np.where(direct, 0, tokens * shape.group_size)
    first = np.cumsum(rows) - rows
    kept = ~direct[item]
    place, entries = place[kept], (first[item] + local * shape.group_size)[kept]
    begin = np.zeros(places + 1, np.int32)
    np.cumsum(np.bincount(place, minlength=places), out=begin[1:])
    return begin, entries[np.argsort(place, kind="stable")].astype(np.int32), direct, first, int(rows.sum())


def _strips(
    sources: _Sources, jobs: _Jobs, narrow: _Pieces, shared: _Pieces, lists: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Strip, first tile, tiles and head of each segment, by CTA and set of tiles; fills each CTA's bounds."""
    ctas = len(lists)
    where = np.concatenate([narrow.part % ctas * 3 + narrow.part // ctas, shared.part * 3 + 2])
    job = np.concatenate([narrow.job, shared.job])
    begin = sources.offset[jobs.source[job]] + np.concatenate([narrow.begin, shared.begin])
    end = begin + np.concatenate([narrow.tiles, shared.tiles])
    low = np.searchsorted(sources.strip_tile_end, begin, "right")
    piece, nth, _ = _expand(np.searchsorted(sources.strip_tile_end, end - 1, "right") - low + 1)
    order = np.argsort(where[piece], kind="stable")
    piece, nth = piece[order], nth[order]
    strip = low[piece] + nth
    strip_begin = np.append(0, sources.strip_tile_end)[strip]
    first = np.maximum(begin[piece], strip_begin) - strip_begin
    tiles = np.minimum(end[piece], sources.strip_tile_end[strip]) - strip_begin - first
    bounds = _bounds(where[piece], 3 * ctas)
    lists[:, 0:6] = bounds.reshape(ctas, 6)
    job = job[piece]
    return strip, first, tiles, jobs.head[job] + ONCE * sources.once[jobs.source[job]], bounds


def _segments(work: WorkList, sources: _Sources, layout: _Layout) -> np.ndarray:
    forest, strip = work.forest, layout.strip
    node, begin = sources.strip_node[strip], sources.strip_first[strip]
    slot = sources.strip_slot[strip] + TILE * layout.first
    segments = np.empty((len(strip), 8), np.int32)
    segments[:, 0] = forest.node_page_indptr[node]
    segments[:, 1] = slot
    segments[:, 2], segments[:, 3] = begin, sources.strip_end[strip]
    segments[:, 4], segments[:, 5] = layout.head, layout.tiles
    segments[:, 6] = np.clip(sources.strip_old[strip] - layout.first, 0, layout.tiles)
    segments[:, 7] = forest.node_start[node] - begin + slot
    return segments


def _copy_first(lists: np.ndarray, segments: np.ndarray, bounds: np.ndarray, pages: np.ndarray, shape: Shape) -> None:
    """Each list's first segment and its first tile's pages into the CTA's record: one miss instead of three."""
    used = np.flatnonzero(bounds[:, 0] < bounds[:, 1])
    cta, kind = used // 3, used % 3
    firsts = segments[bounds[used, 0]]
    boxes = TILE // shape.box
    slot = firsts[:, 1:2] + shape.box * np.arange(boxes)
    at = np.minimum(firsts[:, 0:1] + slot // shape.page_size, len(pages) - 1)
    eights = lists.reshape(len(lists), 8, 8)
    eights[cta, 2 + kind] = firsts
    eights[cta, 5 + kind, :boxes] = np.where(slot < firsts[:, 3:4], pages[at], 0)


def _token_ends(work: WorkList) -> np.ndarray:
    """Positions that each query token attends to: [0, end)."""
    row, local, _ = _expand(work.q_len)
    ends = np.empty(len(row), np.int32)
    ends[work.q_begin[row] + local] = (work.end - work.q_len)[row] + local + 1
    return ends
