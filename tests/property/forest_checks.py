"""Invariants of a forest, checked by brute force."""

from __future__ import annotations

from ramet.cache import Forest, Run


def path_pages(forest: Forest, run: Run, end: int) -> list[int]:
    """KV slots of positions 0 to ``end`` on the path to ``run``."""
    slots: list[int] = []
    size = forest.page_size
    for r in run.lineage():
        pages = r.pages if r.slot is None else forest.tails.pages[r.slot]
        slots = [int(pages[(p - r.start) // size]) * size + (p - r.start) % size for p in range(r.start, end)] + slots
        end = r.start
    return slots


def check_forest(forest: Forest) -> None:
    """Every page has one owner; counts, marks, holds and the index agree with each other."""
    pool, tails, size = forest.pool, forest.tails, forest.page_size
    owned = pool.free_pages().tolist()
    evictable = 0
    holds: dict[tuple[int, int], int] = {}
    for run in forest.runs.values():
        if run.slot is None:
            pages, computed = run.pages.tolist(), run.computed
            assert run.id not in tails.run_id.tolist()
            evictable += max(len(pages) + (-(run.held_end - run.start) // size), 0)
            assert len(run.tokens) == computed - run.start
        else:
            pages, computed = tails.pages[run.slot, : tails.num_pages[run.slot]].tolist(), int(tails.computed[run.slot])
            assert tails.run_id[run.slot] == run.id and tails.start[run.slot] == run.start
            assert tails.parent_id[run.slot] == (-1 if run.parent is None else run.parent.id)
        assert len(pages) >= -(-(computed - run.start) // size)
        owned += pages
        if run.parent is not None:
            assert run.parent.id in forest.runs, "a run's parent is never forgotten before it"
            assert run in list(run.parent.children[run.start])
            if run.slot is not None or run.holds:
                key = (run.parent.id, run.start)
                holds[key] = holds.get(key, 0) + 1
            assert run.start <= (forest.computed(run.parent) if run.parent.slot is None else run.start)
        assert all(p <= computed for p in run.hidden)
    assert sorted(owned) == list(range(pool.num_pages)), "every page is free or has exactly one owner"
    assert evictable == forest.num_evictable
    for (run_id, end), count in holds.items():
        assert forest.runs[run_id].holds.get(end, 0) >= count, "a used run holds its parent"
