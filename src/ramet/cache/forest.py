"""The prefix forest: what is computed, who uses it, and what may go.

The life of storage::

    match ──> begin ──> (written through a slot) ──> retire ──> evicted
       │        │ new run, or the lease of an old one   │ kept for reuse
       └──> hold / drop                                 └── fork: n new runs below, nothing copied

Every use is a *hold* on (run, end). A run with a writer or a hold in turn holds its parent up to where it was forked,
so that what a live row reads can't be evicted; what nobody holds can.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ramet.cache.pages import PagePool
from ramet.cache.runs import Run, Siblings
from ramet.cache.tails import TailTable


class Identity(NamedTuple):
    """What, besides its tokens, tells one prefix from another."""

    salt: str | None = None
    weight_version: int = 0


class Match(NamedTuple):
    """The longest known prefix of a request: ``[0, position)``, ending in ``run`` (None: nothing)."""

    run: Run | None
    position: int


class Forest:
    """Runs by their tokens, holds, forks, and eviction.

    Parameters
    ----------
    pool : PagePool
    tails : TailTable
    keep_unused : bool
        Keep runs for reuse after their last user (``enable_prefix_caching``); else their pages are freed at once.
    """

    def __init__(self, pool: PagePool, tails: TailTable, *, keep_unused: bool = True) -> None:
        self.pool, self.tails, self.keep_unused = pool, tails, keep_unused
        self.page_size = tails.page_size
        self.runs: dict[int, Run] = {}
        self.roots: dict[Any, Siblings] = {}
        self.version = 0
        """Changes whenever the set of live rows does: the plan's node arrays are remade then."""
        self._next_id = 0
        # Frozen runs with something to evict, least recently used first. A run is put in before its ancestors, so that
        # children are met before what they hang on.
        self._evictable: OrderedDict[int, Run] = OrderedDict()
        self.num_evictable = 0

    # ---- finding ---------------------------------------------------------------------------------------------

    def match(self, tokens: np.ndarray, identity: Identity) -> Match:
        """Longest prefix of ``tokens`` that is computed, or that a prefill under way will compute."""
        best = Match(None, 0)
        frontier = list(self._starting(self.roots.get(identity), tokens, 0))
        while frontier:
            run = frontier.pop()
            known = self.known_tokens(run)
            length = min(len(known), len(tokens) - run.start)
            differing = np.flatnonzero(known[:length] != tokens[run.start : run.start + length])
            end = run.start + (int(differing[0]) if len(differing) else length)
            if end > best.position:
                best = Match(run, end)
            for position, siblings in run.children.items():
                if position <= end:
                    frontier.extend(self._starting(siblings, tokens, position))
        return best

    def _starting(self, siblings: Siblings | None, tokens: np.ndarray, position: int) -> list[Run]:
        if siblings is None or position >= len(tokens):
            return []
        return siblings.starting_with(int(tokens[position]), self._first_token)

    def _first_token(self, run: Run) -> int | None:
        known = self.known_tokens(run)
        return int(known[0]) if len(known) else None

    def computed(self, run: Run) -> int:
        """Absolute position up to which the run's K/V is there."""
        return run.computed if run.slot is None else int(self.tails.computed[run.slot])

    def known_tokens(self, run: Run) -> np.ndarray:
        """Tokens from ``run.start`` that can be viewed, or waited for: never a draft, never the last sampled token."""
        if run.slot is None:
            return run.tokens
        missing = int(self.tails.computed[run.slot]) - run.start - len(run.tokens)
        if missing <= 0:
            return run.tokens
        first = run.start + len(run.tokens) - int(self.tails.sampled_from[run.slot])
        return np.concatenate([run.tokens, self.tails.sampled[run.slot, first : first + missing]])

    # ---- writing ---------------------------------------------------------------------------------------------

    def begin(self, match: Match, tokens: np.ndarray, identity: Identity, slot: int, *, indexed: bool = True) -> Run:
        """Let ``slot`` write what ``match`` lacks of ``tokens``: in a new run, or under the matched one's lease."""
        run, position = match
        if run is not None and self.can_lease(run, position):
            self.lease(run, slot)
            run.tokens = tokens[run.start :]
            return run
        new = self._new_run(identity, run, position, tokens[position:], indexed)
        self.tails.bind(np.array([slot]), np.array([new.id]), -1 if run is None else run.id, position)
        new.slot = slot
        if run is not None:
            self.hold(run, position)
        self.version += 1
        return new

    def fork(self, run: Run, position: int, slots: np.ndarray) -> list[Run]:
        """Start one new run per slot below ``(run, position)``. Nothing is computed again and nothing is copied."""
        none = np.empty(0, np.int32)
        new = [self._new_run(run.identity, run, position, none, run.indexed) for _ in slots]
        self.tails.bind(slots, np.array([r.id for r in new]), run.id, position)
        for child, slot in zip(new, slots.tolist(), strict=True):
            child.slot = slot
        self.hold(run, position, count=len(new))
        self.version += 1
        return new

    def _new_run(self, identity: Any, parent: Run | None, start: int, tokens: np.ndarray, indexed: bool) -> Run:
        run = Run(self._next_id, identity, parent, start, tokens, indexed)
        self._next_id += 1
        self.runs[run.id] = run
        if parent is not None:
            # Unindexed children too: the position they hang at must not be evicted from under them.
            parent.children.setdefault(start, Siblings()).add(run)
        elif indexed:
            self.roots.setdefault(identity, Siblings()).add(run)
        return run

    def can_lease(self, run: Run, position: int) -> bool:
        """Whether a row that continues at ``position`` may write on in ``run``: it ends there and nobody writes it."""
        return run.slot is None and run.computed == position and run.start < position

    def lease(self, run: Run, slot: int) -> None:
        """Let ``slot`` write on at the end of ``run`` (see :meth:`can_lease`): an unforked chat stays one run."""
        if not self._is_pinned(run) and run.parent is not None:
            self.hold(run.parent, run.start)
        self._unlist(run)
        one = np.array([slot])
        self.tails.bind(one, np.array([run.id]), -1 if run.parent is None else run.parent.id, run.start)
        self.tails.append(one, np.array([len(run.pages)]), run.pages)
        self.tails.computed[slot] = run.computed
        run.pages, run.slot = np.empty(0, np.int32), slot
        self.version += 1

    def reserve(self, slots: np.ndarray, ends: np.ndarray) -> bool:
        """Give every row the pages for positions up to ``ends``, evicting what nobody holds.

        Returns
        -------
        bool
            False, with nothing changed but evictions, if the pool cannot hold it.
        """
        missing = self.tails.pages_missing(slots, ends)
        total = int(missing.sum())
        if total == 0:
            return True
        if not self.make_room(total):
            return False
        self.tails.append(slots, missing, self.pool.allocate(total))
        return True

    @property
    def num_available(self) -> int:
        """Pages that are free or could be evicted now."""
        return self.pool.num_free + self.num_evictable

    def make_room(self, pages: int) -> bool:
        """Evict until ``pages`` are free; False if that cannot be."""
        if pages > self.num_available:
            return False
        while self.pool.num_free < pages:
            if not self._evict_some(pages - self.pool.num_free):
                return False
        return True

    def retire(self, run: Run) -> None:
        """End the writing of a run: its arrays become its own; what nobody holds of it becomes evictable."""
        tails, slot = self.tails, run.slot
        assert slot is not None
        tokens = self.known_tokens(run)
        run.computed = int(tails.computed[slot])
        run.tokens = tokens[: run.computed - run.start]
        # A chunk that was planned may have got pages beyond the mark (an abort in between): they go back at once.
        used = -(-(run.computed - run.start) // self.page_size)
        pages = tails.pages[slot, : tails.num_pages[slot]].copy()
        if used < len(pages):
            self.pool.release(pages[used:])
        run.pages, run.slot = pages[:used], None
        tails.give_back(slot)
        self.version += 1
        self._settle(run)
        # the writer's own hold on the parent ends, unless holds of others keep the run pinned
        if not self._is_pinned(run) and run.parent is not None:
            self.drop(run.parent, run.start)

    # ---- holding ---------------------------------------------------------------------------------------------

    def _is_pinned(self, run: Run) -> bool:
        return run.slot is not None or bool(run.holds)

    def hold(self, run: Run, end: int, *, count: int = 1) -> None:
        """Keep ``[0, end)`` of the path to ``run`` from eviction."""
        if not self._is_pinned(run) and run.parent is not None:
            self.hold(run.parent, run.start)
        self._unlist(run)
        run.holds[end] = run.holds.get(end, 0) + count
        self._list(run)

    def drop(self, run: Run, end: int) -> None:
        """Undo one :meth:`hold`."""
        self._unlist(run)
        if run.holds[end] == 1:
            del run.holds[end]
        else:
            run.holds[end] -= 1
        self._settle(run)
        if not self._is_pinned(run) and run.parent is not None:
            self.drop(run.parent, run.start)

    # ---- eviction --------------------------------------------------------------------------------------------

    def _spare_pages(self, run: Run) -> int:
        """Pages of a frozen run behind its last hold."""
        held = -(-(run.held_end - run.start) // self.page_size)
        return max(len(run.pages) - held, 0)

    def _list(self, run: Run) -> None:
        if run.slot is None and (spare := self._spare_pages(run)):
            self._evictable[run.id] = run
            self.num_evictable += spare

    def _unlist(self, run: Run) -> None:
        if self._evictable.pop(run.id, None) is not None:
            self.num_evictable -= self._spare_pages(run)

    def _settle(self, run: Run) -> None:
        """Keep what became unused of a frozen run, or free it at once."""
        if run.slot is not None:
            return
        if self.keep_unused and run.indexed:
            self._list(run)
        else:
            self._truncate(run, max(run.held_end, run.last_fork))
        if run.computed == run.start and not run.holds:
            self._forget(run)

    def _evict_some(self, wanted: int) -> bool:
        for run in self._evictable.values():
            floor = max(run.held_end, run.last_fork)
            keep = -(-(floor - run.start) // self.page_size)
            if keep < len(run.pages):
                self._unlist(run)
                keep = max(keep, len(run.pages) - wanted)
                self._truncate(run, max(floor, run.start + keep * self.page_size) if keep else run.start)
                self._list(run)
                if not run.pages.size and not run.holds:
                    self._forget(run)
                return True
        return False

    def _truncate(self, run: Run, end: int) -> None:
        """Cut an unlisted frozen run back to ``end`` and free the pages behind it."""
        end = min(end, run.computed)
        keep = -(-(end - run.start) // self.page_size)
        if keep < len(run.pages):
            self.pool.release(run.pages[keep:])
            run.pages = run.pages[:keep]
        if end < run.computed:
            run.computed = end
            run.tokens = run.tokens[: end - run.start]
            run.hidden = {p: h for p, h in run.hidden.items() if p <= end}

    def _forget(self, run: Run) -> None:
        """Remove an empty run that nobody holds."""
        if run.children or self.runs.pop(run.id, None) is None:
            return
        self._unlist(run)
        parent = run.parent
        if parent is None:
            if run.indexed:
                siblings = self.roots[run.identity]
                siblings.remove(run)
                if not len(siblings):
                    del self.roots[run.identity]
            return
        siblings = parent.children[run.start]
        siblings.remove(run)
        if not len(siblings):
            del parent.children[run.start]

    def clear_unused(self) -> int:
        """Free everything nobody holds; returns the number of pages freed."""
        before = self.pool.num_free
        while self._evict_some(self.pool.num_pages):
            pass
        return self.pool.num_free - before

    # ---- looking ---------------------------------------------------------------------------------------------

    def live_runs(self) -> Iterator[Run]:
        """Runs that have a writer."""
        return (run for run in self.runs.values() if run.slot is not None)
