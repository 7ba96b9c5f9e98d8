"""Plans with buffers of fixed capacity, in Triton's interpreter: what a captured graph does, launched again by hand.

The executor of the *first* plan runs after each later plan, as a graph's replay would: same grids, same addresses.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from attention_oracle import Case, check_against_dense, random_case

from ramet.attention import Capacity, PlanBuffers, Problem, plan, plan_buffers, workspace_size
from ramet.attention.backends.base import Tensors
from ramet.errors import CapacityExceeded, InvalidArgument

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

SCALE = 0.35
PROBLEM = Problem(4, 2, 16, 4, dtype=torch.float32, max_q_len=4)
CAPACITY = Capacity(tokens=12, rows=6, pages=400, items=24)


def buffers(capacity: Capacity = CAPACITY, problem: Problem = PROBLEM, workspace=None) -> PlanBuffers:
    return plan_buffers(problem, capacity, backend="triton", workspace=workspace)


def ready(case: Case, room: PlanBuffers, gate: str = "open", after=None):
    return plan(case.forest(), **case.shape(), dtype=torch.float32, gate=gate, buffers=room, after=after)


def group(seed: int, tails: tuple[int, ...], prefix: int = 21, q_len: int = 1) -> Case:
    case = Case(head_dim=16, seed=seed)
    root = case.node(-1, prefix)
    for tokens in tails:
        case.row(case.node(root, tokens, extra_pages=30), q_len)
    return case


def test_one_launch_serves_every_later_plan_and_addresses_stay() -> None:
    room = buffers()
    places = [tensor.data_ptr() for tensor in [*room.plan.values(), *room.scratch.values()]]
    alone = Case(head_dim=16, seed=4)
    for tokens in (9, 30):
        alone.row(alone.node(-1, tokens))
    cases = [
        group(0, (1, 5, 9)),  # a shared node
        alone,  # none
        group(1, (4,) * 6, prefix=90),
        group(2, (6, 4), q_len=4),
        random_case(3, head_dim=16, max_rows=4, max_tokens=9, q_lens=(0, 1)),
    ]
    first = ready(cases[0], room)
    for case in cases:
        ready(case, room)
        k, v = case.pools()
        q = torch.full((12, 4, 16), float("nan"))
        mine = case.queries()
        q[: len(mine)] = mine
        out = torch.full_like(q, 7.0)
        first._executor.run(Tensors(q, k, v, out, None, SCALE, None))
        check_against_dense(case, mine, out[: len(mine)], SCALE)
        assert (out[len(mine) :] == 7.0).all()  # padding rows are not written
    assert places == [tensor.data_ptr() for tensor in [*room.plan.values(), *room.scratch.values()]]


def test_the_device_holds_what_the_host_mirrors_after_each_plan() -> None:
    room = buffers()
    last = None
    for seed in range(3):
        last = ready(group(seed, (1, 5, 9 + seed)), room, after=last)
        for name in ("counts", "tiles", "tokens", "parts", "row_end", "segments"):
            assert np.array_equal(room.host[name], room.plan[name].numpy()), name
        used = len(last.work.forest.node_pages)
        assert np.array_equal(room.host["pages"][:used], room.plan["pages"][:used].numpy())


def test_steps_that_only_grow_are_written_as_deltas_and_stay_right() -> None:
    room = buffers()
    case = group(0, (1, 5, 9))
    last = ready(case, room)
    rows = last.work.rows
    for _ in range(3):
        for leaf, _ in case.rows:  # 3 tokens more, which cross a page now and then
            node = case.nodes[leaf]
            node.k = torch.cat([node.k, case.normal(3, 2, 16)])
            node.v = torch.cat([node.v, case.normal(3, 2, 16)])
        last = ready(case, room, after=last)
        assert last.work.rows is rows  # taken over
        q = case.queries()
        check_against_dense(case, q, last.run(q, *case.pools(), sm_scale=SCALE), SCALE)


@pytest.mark.parametrize(
    ("capacity", "words"),
    [
        (Capacity(tokens=2, rows=6, pages=400), "3 tokens, but its buffers hold 2"),
        (Capacity(tokens=12, rows=2, pages=400), "3 rows, but its buffers hold 2"),
        (Capacity(tokens=12, rows=6, pages=20), "pages, but its buffers hold 20"),
        (Capacity(tokens=12, rows=6, pages=400, items=2), "items"),
    ],
)
def test_a_plan_beyond_a_capacity_is_refused_and_the_last_one_stays(capacity: Capacity, words: str) -> None:
    room = buffers(capacity)
    before = {name: array.copy() for name, array in room.host.items()}
    with pytest.raises((CapacityExceeded, RuntimeError), match=words):
        ready(group(0, (1, 5, 9)), room)
    assert all(np.array_equal(room.host[name], array) for name, array in before.items())


def test_splits_are_given_up_where_tiles_are_scarce() -> None:
    case = group(0, (1, 5), prefix=150)
    for items, more in ((3, False), (60, True)):
        room = buffers(Capacity(tokens=12, rows=6, pages=400, items=items))
        work = ready(case, room)
        assert (int(room.host["counts"][1]) > 3) == more
        q = case.queries()
        check_against_dense(case, q, work.run(q, *case.pools(), sm_scale=SCALE), SCALE)


def test_the_workspace_is_exact_and_its_neighbours_stay_intact() -> None:
    size = workspace_size(PROBLEM, CAPACITY, backend="triton")
    memory = torch.full((size + 512,), 0xA5, dtype=torch.uint8)
    begin = 256 + -(memory.data_ptr() + 256) % 16
    with pytest.raises(InvalidArgument, match=f"need {size}"):
        buffers(workspace=memory[begin : begin + size - 1])
    with pytest.raises(InvalidArgument, match="no multiple of 16"):
        buffers(workspace=memory[begin + 1 : begin + 1 + size])
    room = buffers(workspace=memory[begin : begin + size])
    case = group(0, (1, 5, 9))
    q = case.queries()
    check_against_dense(case, q, ready(case, room).run(q, *case.pools(), sm_scale=SCALE), SCALE)
    assert (memory[:begin] == 0xA5).all()
    assert (memory[begin + size :] == 0xA5).all()
