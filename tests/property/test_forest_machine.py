"""The forest against a brute-force model, under random operations."""

from __future__ import annotations

import numpy as np
from forest_checks import check_forest, path_pages
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ramet.cache import Forest, Identity, Match, PagePool, Run, TailTable, live_nodes

PAGE = 4
MAX_LEN = 64
ids = st.lists(st.integers(0, 2), min_size=1, max_size=24)


class ForestMachine(RuleBasedStateMachine):
    """Rows start, write, fork and end at random; ``content`` says which token and position every KV slot holds."""

    @initialize(num_pages=st.integers(8, 60), keep=st.booleans())
    def setup(self, num_pages: int, keep: bool) -> None:
        self.forest = Forest(PagePool(num_pages), TailTable(6, MAX_LEN, PAGE), keep_unused=keep)
        self.content: dict[int, tuple[int, int]] = {}
        self.rows: dict[int, tuple[Run, list[int]]] = {}  # slot -> run, all its tokens
        self.held: list[tuple[Run, int, list[int]]] = []
        self.rng = np.random.default_rng(0)

    def write(self, slot: int, upto: int) -> bool:
        _, tokens = self.rows[slot]
        tails = self.forest.tails
        if not self.forest.reserve(np.array([slot]), np.array([upto])):
            return False
        for p in range(int(tails.computed[slot]), upto):
            kv = int(tails.kv_slots(np.array([slot]), np.array([p]))[0])
            self.content[kv] = (tokens[p], p)
        tails.computed[slot] = upto
        return True

    @precondition(lambda self: self.forest.tails.num_free > 0)
    @rule(tokens=ids)
    def start(self, tokens: list[int]) -> None:
        forest = self.forest
        array = np.array(tokens, np.int32)
        match = forest.match(array, Identity())
        best = max((self.common(array, run) for run in forest.runs.values() if run.indexed), default=0)
        assert match.position == best, "the longest known prefix is found"
        position = match.position
        if position == len(tokens):
            position -= 1
        if match.run is not None and position > forest.computed(match.run):
            return  # would wait for another row's prefill
        found = forest.match(array[:position], Identity()) if position else Match(None, 0)
        assert found.position == position
        slot = int(forest.tails.take(1)[0])
        run = forest.begin(found, array, Identity(), slot)
        forest.tails.sampled_from[slot] = len(tokens)
        self.rows[slot] = (run, list(tokens))
        if not self.write(slot, len(tokens)):
            self.end(slot)

    def common(self, tokens: np.ndarray, run: Run) -> int:
        """Brute force: agreement of ``tokens`` with the whole path to ``run``."""
        path: list[int] = []
        end = None
        for r in run.lineage():
            known = self.forest.known_tokens(r).tolist()
            path = (known if end is None else known[: end - r.start]) + path
            end = r.start
        n = 0
        while n < min(len(tokens), len(path)) and tokens[n] == path[n]:
            n += 1
        return n

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def sample(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        _, tokens = self.rows[slot]
        if len(tokens) >= MAX_LEN:
            return
        token = data.draw(st.integers(0, 2))
        tails = self.forest.tails
        tails.sampled[slot, len(tokens) - tails.sampled_from[slot]] = token
        tokens.append(token)
        if not self.write(slot, len(tokens)):
            tokens.pop()

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), n=st.integers(1, 3))
    def fork(self, data: st.DataObject, n: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        run, tokens = self.rows[slot]
        if self.forest.tails.num_free < n:
            return
        position = data.draw(st.integers(run.start + 1, len(tokens))) if len(tokens) > run.start else None
        if position is None or position > self.forest.computed(run):
            return
        slots = self.forest.tails.take(n)
        for child in self.forest.fork(run, position, slots):
            assert child.slot is not None
            self.forest.tails.sampled_from[child.slot] = position
            self.rows[child.slot] = (child, tokens[:position])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        run, tokens = self.rows[slot]
        computed = self.forest.computed(run)
        if computed > run.start:
            position = data.draw(st.integers(run.start + 1, computed))
            self.forest.hold(run, position)
            self.held.append((run, position, tokens[:position]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        run, position, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.forest.drop(run, position)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def lease_or_fork_from_hold(self, data: st.DataObject) -> None:
        run, position, tokens = data.draw(st.sampled_from(self.held))
        if self.forest.tails.num_free == 0:
            return
        slot = int(self.forest.tails.take(1)[0])
        if self.forest.can_lease(run, position):
            self.forest.lease(run, slot)
        else:
            (run,) = self.forest.fork(run, position, np.array([slot]))
        self.forest.tails.sampled_from[slot] = position
        self.rows[slot] = (run, list(tokens))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.rows))))

    def end(self, slot: int) -> None:
        run, _ = self.rows.pop(slot)
        self.forest.retire(run)

    @rule()
    def clear(self) -> None:
        self.forest.clear_unused()
        assert self.forest.num_evictable == 0

    @invariant()
    def everything_readable_is_right(self) -> None:
        if not hasattr(self, "forest"):
            return
        check_forest(self.forest)
        for run, tokens in self.rows.values():
            self.check_path(run, tokens, self.forest.computed(run))
        for run, position, tokens in self.held:
            self.check_path(run, tokens, position)
        self.check_nodes()

    def check_path(self, run: Run, tokens: list[int], end: int) -> None:
        for p, kv in enumerate(path_pages(self.forest, run, end)):
            assert self.content[kv] == (tokens[p], p)

    def check_nodes(self) -> None:
        forest, tails = self.forest, self.forest.tails
        live = live_nodes(forest)
        assert sorted(live.slots.tolist()) == sorted(self.rows)
        rows = np.arange(len(live.slots))
        ends = tails.computed[live.slots]
        arrays = live.forest_arrays(tails, rows, ends, np.zeros(len(rows), np.int64))
        below: dict[int, list[int]] = {}
        for r, slot in enumerate(live.slots.tolist()):
            node, upto, slots = int(arrays.row_leaf[r]), None, []
            while node >= 0:
                below.setdefault(node, []).append(r)
                a, b = int(arrays.node_start[node]), int(arrays.node_end[node])
                assert upto is None or b == upto, "a child starts where its parent ends"
                pages = arrays.node_pages[arrays.node_page_indptr[node] : arrays.node_page_indptr[node + 1]]
                first = int(arrays.node_first_slot[node])
                assert len(pages) == -(-(first + b - a) // PAGE) or a == b
                slots = [int(pages[(first + i) // PAGE]) * PAGE + (first + i) % PAGE for i in range(b - a)] + slots
                upto, node = a, int(arrays.node_parent[node])
                assert node < len(live.parent)
            assert upto == 0
            _, tokens = self.rows[slot]
            assert [self.content[s] for s in slots] == [(tokens[p], p) for p in range(len(slots))]
            assert len(slots) == ends[r]
        for rows_below in below.values():
            assert rows_below == list(range(rows_below[0], rows_below[-1] + 1)), "rows below a node are one interval"

    def teardown(self) -> None:
        if not hasattr(self, "forest"):
            return
        for slot in list(self.rows):
            self.end(slot)
        for run, position, _ in self.held:
            self.forest.drop(run, position)
        self.forest.clear_unused()
        assert self.forest.pool.num_free == self.forest.pool.num_pages
        assert not self.forest.runs


TestForestMachine = ForestMachine.TestCase
TestForestMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
