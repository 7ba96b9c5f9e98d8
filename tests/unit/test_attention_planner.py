"""The planner: order, shared nodes, tails, counters, refusals. Work lists are checked against walks over the forest."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import torch
from attention_oracle import Case, random_case

from ramet.attention import ForestArrays, plan
from ramet.attention.build import build_work
from ramet.attention.problem import SharePolicy
from ramet.errors import InvalidArgument, RametError

ALWAYS = SharePolicy(min_saved_tokens=0)


def below(case: Case, node: int) -> list[int]:
    """Rows with queries whose path has the node."""
    return [row for row, (_, q_len) in enumerate(case.rows) if q_len and node in case.path(row)]


@pytest.mark.parametrize("seed", range(20))
def test_rows_below_every_node_are_one_interval(seed: int) -> None:
    case = random_case(seed, q_lens=(0, 1, 3))
    work = build_work(case.forest(), ALWAYS)
    assert sorted(work.rows.tolist()) == [row for row, (_, q_len) in enumerate(case.rows) if q_len]
    for node in range(len(case.nodes)):
        places = [i for i, row in enumerate(work.rows.tolist()) if node in case.path(row)]
        assert places == list(range(places[0], places[0] + len(places))) if places else True


@pytest.mark.parametrize("seed", range(20))
def test_every_row_reads_each_node_of_its_path_once(seed: int) -> None:
    case = random_case(seed, q_lens=(0, 1, 3))
    work = build_work(case.forest(), ALWAYS)
    for i, row in enumerate(work.rows.tolist()):
        shared = work.item_node[(work.item_row_begin <= i) & (i < work.item_row_end)].tolist()
        tail = work.tail_node[work.tail_indptr[i] : work.tail_indptr[i + 1]].tolist()
        assert sorted(shared + tail) == case.path(row)
        assert tail == sorted(tail)
        assert all(len(below(case, node)) > 1 for node in shared)
        above = work.item_node[work.row_item[i]] if work.row_item[i] >= 0 else -1
        assert above == (max(shared) if shared else -1)
        for node in shared:
            item = work.item_node.tolist().index(node)
            higher = [other for other in shared if other < node]
            assert work.item_above[item] == (work.item_node.tolist().index(max(higher)) if higher else -1)
        assert work.row_tokens[i] == work.end[i] == case.end(case.rows[row][0])


def test_rows_that_come_depth_first_are_not_moved() -> None:
    case = Case()
    root = case.node(-1, 8)
    inner = [case.node(root, 5) for _ in range(2)]
    for parent in (inner[1], inner[0], root):
        for _ in range(3):
            case.row(case.node(parent, 1))
    assert build_work(case.forest(), ALWAYS).rows.tolist() == list(range(9))


def test_interleaved_rows_are_ordered_depth_first() -> None:
    case = Case()
    roots = [case.node(-1, 8) for _ in range(2)]
    for i in range(6):
        case.row(case.node(roots[i % 2], 1))
    assert build_work(case.forest(), ALWAYS).rows.tolist() == [0, 2, 4, 1, 3, 5]


def test_counters_count_a_shared_node_once_and_logically_for_each_row() -> None:
    case = Case()
    root = case.node(-1, 100)
    for _ in range(4):
        case.row(case.node(root, 7))
    alone = case.node(-1, 30)
    case.row(alone, q_len=5)
    case.row(alone, q_len=0)
    counters = plan(case.forest(), **case.shape(), gate="open").counters
    assert dataclasses.asdict(counters) == {
        "rows": 5,
        "tokens": 9,
        "shared_nodes": 1,
        "declined_nodes": 0,
        "rows_sharing": 4,
        "kv_tokens_read": 100 + 4 * 7 + 30,
        "kv_tokens_logical": 4 * 107 + 30,
    }


def test_closed_gate_reads_everything_per_row_and_says_so() -> None:
    case = Case()
    root = case.node(-1, 100)
    for _ in range(4):
        case.row(case.node(root, 7))
    counters = plan(case.forest(), **case.shape(), gate="closed").counters
    assert (counters.shared_nodes, counters.declined_nodes, counters.rows_sharing) == (0, 1, 0)
    assert counters.kv_tokens_read == counters.kv_tokens_logical == 4 * 107


def test_automatic_gate_declines_a_small_node_beside_a_large_one() -> None:
    case = Case(num_pages=4096)
    large, small = case.node(-1, 8000), case.node(-1, 8)
    for parent in (large, small):
        for _ in range(8):
            case.row(case.node(parent, 1))
    counters = plan(case.forest(), **case.shape(), backend="cpu").counters
    assert (counters.shared_nodes, counters.declined_nodes, counters.rows_sharing) == (1, 1, 8)


def test_node_without_tokens_is_never_shared() -> None:
    case = Case()
    root = case.node(-1, 0)
    for _ in range(3):
        case.row(case.node(root, 2))
    assert plan(case.forest(), **case.shape(), gate="open").counters.shared_nodes == 0


def test_plan_of_no_rows_runs() -> None:
    case = Case()
    work = plan(case.forest(), **case.shape())
    pool = torch.zeros(1, 4, 2, 8)
    assert work.run(torch.empty(0, 4, 8), pool, pool, sm_scale=1.0).shape == (0, 4, 8)
    assert dataclasses.astuple(work.counters) == (0,) * 7


def two_rows() -> ForestArrays:
    case = Case()
    root = case.node(-1, 6)
    case.row(case.node(root, 3), 2)
    case.row(case.node(root, 2), 1)
    return case.forest()


SHAPE = Case().shape()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cu_seqlens_q", [1, 2, 3]),
        ("cu_seqlens_q", [0, 2, 1]),
        ("cu_seqlens_q", [0, 2]),
        ("cu_seqlens_q", [0, 20, 21]),
        ("row_leaf", [1, 3]),
        ("row_leaf", [-1, 1]),
        ("node_parent", [-1, 0, 2]),
        ("node_parent", [-2, 0, 0]),
        ("node_start", [0, 5, 6]),
        ("node_start", [-1, 6, 6]),
        ("node_end", [6, 5, 8]),
        ("node_end", [5, 9, 8]),
        ("node_end", [6, 90, 8]),
        ("node_first_slot", [0, 4, 0]),
        ("node_first_slot", [0, -1, 0]),
        ("node_first_slot", [3, 0, 0]),
        ("node_page_indptr", [0, 1, 3, 4]),
        ("node_page_indptr", [1, 2, 3, 4]),
        ("node_page_indptr", [0, 2, 3, 5]),
        ("node_pages", [7, -1, 3, 4]),
    ],
)
def test_arrays_that_are_no_forest_are_refused_by_name(name: str, change: list[int]) -> None:
    forest = dataclasses.replace(two_rows(), **{name: np.array(change, np.int32)})
    with pytest.raises(InvalidArgument) as error:
        plan(forest, **SHAPE)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, RametError)
    # A wrong start of a root is also a wrong end of its parent, and so on: any array of the pair may be named.
    pairs = {"node_end": "node_", "node_start": "node_", "node_first_slot": "node_"}
    assert pairs.get(name, name) in str(error.value)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ForestArrays)])
@pytest.mark.parametrize(
    "bad", [[0, 1], np.zeros((2, 2), np.int32), np.zeros(3, np.float32)], ids=["list", "2d", "float"]
)
def test_arrays_of_other_kinds_are_refused_by_name(name: str, bad: object) -> None:
    with pytest.raises(InvalidArgument, match=name):
        plan(dataclasses.replace(two_rows(), **{name: bad}), **SHAPE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_qo_heads": 3}, "num_qo_heads is 3; it must be a multiple of num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"head_dim": 1.5}, "head_dim is 1.5"),
        ({"page_size": -4}, "page_size is -4"),
        ({"gate": "opne"}, "did you mean 'open'"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        plan(two_rows(), **{**SHAPE, **change})  # type: ignore[arg-type]


def test_pages_behind_the_last_position_may_be_evicted() -> None:
    case = Case()
    leaf = case.node(-1, 5, extra_pages=2)
    case.nodes[leaf].pages[2:] = [-1, -1]
    case.row(leaf)
    plan(case.forest(), **case.shape())


def deep_forest(num_rows: int, prefix: int, tail: int, page_size: int = 16) -> ForestArrays:
    pages = np.array([-(-prefix // page_size)] + [-(-tail // page_size)] * num_rows)
    ends = np.append(prefix, np.full(num_rows, prefix + tail))
    return ForestArrays(
        cu_seqlens_q=np.arange(num_rows + 1, dtype=np.int32),
        row_leaf=np.arange(1, num_rows + 1, dtype=np.int32),
        node_parent=np.append(-1, np.zeros(num_rows)).astype(np.int32),
        node_start=np.append(0, np.full(num_rows, prefix)).astype(np.int32),
        node_end=ends.astype(np.int32),
        node_first_slot=np.zeros(num_rows + 1, np.int32),
        node_page_indptr=np.append(0, np.cumsum(pages)).astype(np.int32),
        node_pages=np.arange(pages.sum(), dtype=np.int32),
    )


def test_planning_cost_is_far_from_one_python_call_per_row() -> None:
    """2,048 rows take about a millisecond; the bound is loose, since tests share the machine."""
    forest = deep_forest(2048, 512, 32)
    shape = {"num_qo_heads": 9, "num_kv_heads": 3, "head_dim": 64, "page_size": 16}
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        plan(forest, **shape)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.015
