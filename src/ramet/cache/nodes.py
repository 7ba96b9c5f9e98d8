"""The live part of the forest as arrays for the attention planner.

A run is cut wherever live rows leave it::

    run R   |------------- node A -------------|--- node B ---|- tail of R's writer -
            start                              e1             e2
                                               └ rows forked at e1
                                                              └ rows forked at e2

Rows come out depth-first, so the rows below any node are one interval. Python loops over places where rows fork, not
over rows: a thousand samples of one prompt are one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ramet.attention.types import ForestArrays
from ramet.cache.forest import Forest
from ramet.cache.runs import Run
from ramet.cache.tails import NO_RUN, TailTable


@dataclass(frozen=True)
class LiveNodes:
    """Nodes above the tails, and where each live row's tail begins; valid while the set of live rows stays the same.

    Attributes
    ----------
    slots : int64 [rows]
        Live slots in depth-first order.
    tail_parent : int64 [rows]
        Node above each row's tail, -1 for none.
    tail_start : int64 [rows]
        Absolute position where each row's tail begins.
    parent, start, end, first_slot : int32 [nodes]
    page_indptr : int64 [nodes + 1]
    pages : int32 [sum of pages]
    """

    slots: np.ndarray
    tail_parent: np.ndarray
    tail_start: np.ndarray
    parent: np.ndarray
    start: np.ndarray
    end: np.ndarray
    first_slot: np.ndarray
    page_indptr: np.ndarray
    pages: np.ndarray

    def forest_arrays(self, tails: TailTable, rows: np.ndarray, ends: np.ndarray, q_lens: np.ndarray) -> ForestArrays:
        """Add the tails of some rows, and their queries.

        Parameters
        ----------
        tails : TailTable
        rows : int64 [R]
            Indices into ``slots``, ascending.
        ends : int64 [R]
            Context length of each row, this step's tokens included.
        q_lens : int64 [R]
        """
        slots, tail_start = self.slots[rows], self.tail_start[rows]
        size = tails.page_size
        offset = tail_start - tails.start[slots]
        first_page = offset // size
        counts = -(-(ends - tails.start[slots]) // size) - first_page
        indptr = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=indptr[1:])
        within = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - first_page, counts)
        tail_pages = tails.pages[np.repeat(slots, counts), within]
        cu_seqlens_q = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(q_lens, out=cu_seqlens_q[1:])
        num_nodes = len(self.parent)
        return ForestArrays(
            cu_seqlens_q=cu_seqlens_q,
            row_leaf=np.arange(num_nodes, num_nodes + len(rows), dtype=np.int32),
            node_parent=np.concatenate([self.parent, self.tail_parent[rows]]).astype(np.int32),
            node_start=np.concatenate([self.start, tail_start]).astype(np.int32),
            node_end=np.concatenate([self.end, ends]).astype(np.int32),
            node_first_slot=np.concatenate([self.first_slot, offset % size]).astype(np.int32),
            node_page_indptr=np.concatenate([self.page_indptr, self.page_indptr[-1] + indptr[1:]]).astype(np.int32),
            node_pages=np.concatenate([self.pages, tail_pages]),
        )


@dataclass
class _Builder:
    """Collects nodes and the order of places while walking the runs."""

    forest: Forest
    # run id (NO_RUN: above all roots) -> position -> what hangs there: runs to walk into, and whether rows fork there
    exits: dict[int, dict[int, list[Run]]] = field(default_factory=dict)
    places: list[tuple[int, int, int]] = field(default_factory=list)  # (parent run id, start, node above)
    writers: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # slot -> (rank, node above, tail start)
    parent: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    first_slot: list[int] = field(default_factory=list)
    pages: list[np.ndarray] = field(default_factory=list)

    def mark(self, run: Run, position: int) -> None:
        """Note that live rows leave ``run`` at ``position``, and mark the way up from there."""
        at: Run | None = run
        child: Run | None = None
        while at is not None:
            seen = at.id in self.exits
            hung = self.exits.setdefault(at.id, {}).setdefault(position, [])
            if child is not None:
                hung.append(child)
            if seen:  # the way up is marked already
                return
            child, position, at = at, at.start, at.parent
        self.exits[NO_RUN][0] += [child] if child is not None else []

    def walk(self) -> None:
        """Emit all places and nodes, depth-first."""
        # An explicit stack: forks of forks of forks may nest deeper than Python calls can.
        stack = [self._hang(NO_RUN, 0, -1)]
        while stack:
            below = next(stack[-1], None)
            if below is None:
                stack.pop()
            else:
                stack.append(self._cut(*below))

    def _cut(self, run: Run, above: int) -> Iterator[tuple[Run, int]]:
        """Cut one run at its exits; yields the runs to walk into, each with the node above it."""
        begin = run.start
        for position in sorted(self.exits[run.id]):
            if position > begin:
                above = self._node(run, above, begin, position)
                begin = position
            yield from self._hang(run.id, position, above)
        if run.slot is not None:
            self.writers[run.slot] = (len(self.places), above, begin)
            self.places.append((NO_RUN, -1 - run.slot, above))

    def _hang(self, run_id: int, position: int, above: int) -> Iterator[tuple[Run, int]]:
        """What hangs at one place: the rows forked there, then the runs that have nodes of their own."""
        self.places.append((run_id, position, above))
        for child in self.exits[run_id][position]:
            yield child, above

    def _node(self, run: Run, above: int, begin: int, end: int) -> int:
        size = self.forest.page_size
        first, last = (begin - run.start) // size, -(-(end - run.start) // size)
        source = run.pages if run.slot is None else self.forest.tails.pages[run.slot]
        self.parent.append(above)
        self.start.append(begin)
        self.end.append(end)
        self.first_slot.append((begin - run.start) % size)
        self.pages.append(source[first:last].copy())
        return len(self.parent) - 1


def live_nodes(forest: Forest) -> LiveNodes:
    """Cut the runs of all live rows into nodes and order the rows depth-first.

    A row that waits for its prefix (another row still computes it) is not live yet.
    """
    tails = forest.tails
    slots = np.flatnonzero(tails.run_id != NO_RUN)
    parent_id, start = tails.parent_id[slots], tails.start[slots]
    order = np.lexsort((start, parent_id))
    slots, parent_id, start = slots[order], parent_id[order], start[order]
    new_place = np.ones(len(slots), bool)
    new_place[1:] = (np.diff(parent_id) != 0) | (np.diff(start) != 0)
    firsts = np.flatnonzero(new_place)
    ready = np.array(
        [
            parent == NO_RUN or forest.computed(forest.runs[parent]) >= position
            for parent, position in zip(parent_id[firsts].tolist(), start[firsts].tolist(), strict=True)
        ],
        bool,
    )
    if not ready.all():
        keep = ready[np.cumsum(new_place) - 1]
        slots, parent_id, start, new_place = slots[keep], parent_id[keep], start[keep], new_place[keep]
        firsts = np.flatnonzero(new_place)

    build = _Builder(forest)
    build.exits[NO_RUN] = {0: []}
    for parent, position in zip(parent_id[firsts].tolist(), start[firsts].tolist(), strict=True):
        if parent != NO_RUN:
            build.mark(forest.runs[parent], position)
    build.walk()

    rank_of = {(run_id, position): (rank, above) for rank, (run_id, position, above) in enumerate(build.places)}
    ranks = [rank_of[key] for key in zip(parent_id[firsts].tolist(), start[firsts].tolist(), strict=True)]
    place = np.cumsum(new_place) - 1
    rank = np.array([r for r, _ in ranks], np.int64)[place] if len(slots) else np.empty(0, np.int64)
    above = np.array([a for _, a in ranks], np.int64)[place] if len(slots) else np.empty(0, np.int64)
    tail_start = start.copy()
    if build.writers:  # rows whose own run others hang on: their tail begins behind the last of those
        index = {slot: i for i, slot in enumerate(slots.tolist())}
        for slot, (r, a, begin) in build.writers.items():
            rank[index[slot]], above[index[slot]], tail_start[index[slot]] = r, a, begin
    order = np.argsort(rank, kind="stable")
    counts = [len(p) for p in build.pages]
    return LiveNodes(
        slots=slots[order],
        tail_parent=above[order],
        tail_start=tail_start[order],
        parent=np.array(build.parent, np.int32),
        start=np.array(build.start, np.int32),
        end=np.array(build.end, np.int32),
        first_slot=np.array(build.first_slot, np.int32),
        page_indptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        pages=np.concatenate(build.pages) if build.pages else np.empty(0, np.int32),
    )
