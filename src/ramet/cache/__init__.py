"""The forest cache: pages, runs and nodes. It knows tokens and positions, not tensors or models.

``pages``  who owns which page of the pool
``tails``  what live rows are writing, in arrays indexed by slot
``runs``   storage: append-only lists of pages with a ``computed`` mark and at most one writer
``forest`` reuse exact to the token, forks without copies, holds, eviction
``nodes``  the live part of the forest as arrays for the attention planner
"""

from ramet.cache.forest import Forest, Identity, Match
from ramet.cache.nodes import LiveNodes, live_nodes
from ramet.cache.pages import PagePool
from ramet.cache.runs import Run
from ramet.cache.tails import TailTable

__all__ = ["Forest", "Identity", "LiveNodes", "Match", "PagePool", "Run", "TailTable", "live_nodes"]
