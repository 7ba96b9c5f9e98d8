"""What an engine has done and holds, as plain numbers for ``LLM.stats()``, the metrics and the log."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from ramet.cache import live_nodes
from ramet.engine.engine import Engine


def snapshot(engine: Engine) -> dict[str, Any]:
    """Return the counters since the start and the state of the pool; the keys are in ``docs/reference/stats.md``."""
    pool, forest, waiting = engine.forest.pool, engine.forest, engine.scheduler.waiting
    in_use = pool.num_allocated - forest.num_evictable
    shared = min(_shared_pages(engine), in_use)
    not_begun = sum(group.times.scheduled is None for group in engine.groups.values())
    return {
        **asdict(engine.stats),
        "sampler": dict(engine.sampler.counters),
        "requests_waiting": not_begun,
        "requests_running": len(engine.groups) - not_begun,
        "groups_waiting": len(waiting),
        "samples_waiting": sum(len(admission.samples) for admission in waiting),
        "samples_running": engine.rows.num_running,
        "pages_total": pool.num_pages,
        "pages_free": pool.num_free,
        "pages_cached": forest.num_evictable,
        "pages_in_use": in_use,
        "pages_shared": shared,
        "pages_private": in_use - shared,
        "page_bytes": engine.memory.page_bytes,
        "runs": len(forest.runs),
    }


def _shared_pages(engine: Engine) -> int:
    """Pages that two or more running samples read."""
    live = live_nodes(engine.forest)
    rows = np.bincount(live.tail_parent[live.tail_parent >= 0], minlength=len(live.parent))
    for node in range(len(rows) - 1, -1, -1):  # a parent comes before its children
        if live.parent[node] >= 0:
            rows[live.parent[node]] += rows[node]
    of_node = np.repeat(rows, np.diff(live.page_indptr))
    return len(np.unique(live.pages[of_node > 1]))
