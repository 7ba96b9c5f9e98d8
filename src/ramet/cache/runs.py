"""Runs: append-only storage of K/V with a ``computed`` mark and at most one writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


class Run:
    """A stretch of tokens whose K/V lies in pages of its own.

    It begins at absolute position ``start``, where it was forked from ``parent`` (or at 0), in a fresh page: a fork
    copies nothing. While a row writes it, its pages and its mark live in that row of the ``TailTable``; the forest
    copies them back when the writer lets go.

    Attributes
    ----------
    id : int
        A generation counter: never used twice, so a stale reference can't reach another run's storage.
    tokens : int32 array
        Known tokens from ``start``: computed ones, and for a prefill those it will compute.
    pages : int32 array
        Without a writer: the run's pages.
    computed : int
        Without a writer: absolute position up to which K/V is there.
    slot : int or None
        The writing row.
    holds : dict of int to int
        Absolute end position -> how many hold the run up to there. Held positions are never evicted, and a prefill goes
        on as long as someone holds more than it has computed.
    hidden : dict of int to tensor
        Absolute position p -> last hidden state after p tokens, kept at prompt ends: a full hit needs no forward pass.
    indexed : bool
        Whether requests may find it by its tokens.
    """

    __slots__ = (
        "children",
        "computed",
        "hidden",
        "holds",
        "id",
        "identity",
        "indexed",
        "pages",
        "parent",
        "slot",
        "start",
        "tokens",
    )

    def __init__(self, id: int, identity: Any, parent: Run | None, start: int, tokens: np.ndarray, indexed: bool):
        self.id, self.identity, self.parent, self.start = id, identity, parent, start
        self.tokens = tokens
        self.pages = np.empty(0, np.int32)
        self.computed = start
        self.slot: int | None = None
        self.holds: dict[int, int] = {}
        self.hidden: dict[int, Any] = {}
        self.children: dict[int, Siblings] = {}
        self.indexed = indexed

    @property
    def held_end(self) -> int:
        """The furthest position that someone holds."""
        return max(self.holds, default=self.start)

    @property
    def last_fork(self) -> int:
        """The furthest position where another run hangs."""
        return max(self.children, default=self.start)

    def lineage(self) -> Iterator[Run]:
        """The run and its ancestors, from leaf to root."""
        run: Run | None = self
        while run is not None:
            yield run
            run = run.parent

    def __repr__(self) -> str:
        return f"Run(id={self.id}, start={self.start}, computed={self.computed}, slot={self.slot}, holds={self.holds})"


class Siblings:
    """Runs forked at one position, found by their first token.

    A fork does not know its first token yet; it waits in ``fresh`` until a look-up sees that it has one.
    """

    __slots__ = ("_token_of", "by_token", "fresh")

    def __init__(self) -> None:
        self.by_token: dict[int, dict[int, Run]] = {}
        self.fresh: dict[int, Run] = {}
        self._token_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.fresh) + len(self._token_of)

    def __iter__(self) -> Iterator[Run]:
        yield from self.fresh.values()
        for runs in self.by_token.values():
            yield from runs.values()

    def add(self, run: Run) -> None:
        self.fresh[run.id] = run

    def remove(self, run: Run) -> None:
        if self.fresh.pop(run.id, None) is None:
            del self.by_token[self._token_of.pop(run.id)][run.id]

    def starting_with(self, token: int, first_token: Callable[[Run], int | None]) -> list[Run]:
        """Runs whose first token is ``token``; ``first_token(run)`` is None while a run has none."""
        for run in list(self.fresh.values()):
            first = first_token(run)
            if first is not None:
                del self.fresh[run.id]
                self._token_of[run.id] = first
                self.by_token.setdefault(first, {})[run.id] = run
        return list(self.by_token.get(token, {}).values())
