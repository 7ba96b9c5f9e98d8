"""Plans of one step after another: what is taken over is only what is equal, and nothing stale is ever read."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from attention_oracle import Case, check_against_dense, random_case

import ramet
from ramet.attention import ForestArrays, plan
from ramet.attention.build import build_work, grown
from ramet.attention.checks import check_forest
from ramet.attention.problem import SharePolicy
from ramet.errors import InvalidArgument

POLICY = SharePolicy(0)


def with_room(case: Case, pages: int) -> Case:
    """Nodes get pages to grow into."""
    for node in case.nodes:
        node.pages += [case.free.pop() for _ in range(pages)]
    return case


def longer(forest: ForestArrays, more: np.ndarray) -> ForestArrays:
    return dataclasses.replace(forest, node_end=(forest.node_end + more).astype(np.int32))


def group(rows: int = 4) -> Case:
    case = Case(num_pages=256)
    root = case.node(-1, 21)
    for tokens in range(1, rows + 1):
        case.row(case.node(root, tokens))
    return with_room(case, 3)


@pytest.mark.parametrize("seed", range(12))
def test_a_grown_work_list_is_the_one_built_anew(seed: int) -> None:
    case = random_case(seed, q_lens=(0, 1, 3))
    with_room(case, 2)
    forest = case.forest()
    last = build_work(forest, POLICY)
    free = np.ones(forest.num_nodes, bool)
    free[last.fixed_node] = False
    after = longer(forest, np.where(free, case.numpy.integers(0, 5, forest.num_nodes), 0))
    check_forest(after, case.page_size)
    work, anew = grown(last, after, case.page_size, POLICY, "auto"), build_work(after, POLICY)
    assert work is not None
    for field in dataclasses.fields(work):
        mine, other = getattr(work, field.name), getattr(anew, field.name)
        equal = np.array_equal(mine, other) if isinstance(mine, np.ndarray) else mine is other or mine == other
        assert equal, field.name


def test_only_growth_of_tails_and_pages_is_taken_over() -> None:
    case = group()
    forest = case.forest()
    last = build_work(forest, POLICY)

    def taken(**arrays: np.ndarray) -> bool:
        return grown(last, dataclasses.replace(forest, **arrays), case.page_size, POLICY, "auto") is not None

    end = forest.node_end
    assert taken(node_end=end + np.array([0, 1, 0, 2, 1], np.int32))
    assert taken(node_pages=forest.node_pages[::-1].copy())
    assert not taken(node_end=end - np.array([0, 0, 1, 0, 0], np.int32))
    assert not taken(node_end=end + 1)  # the shared node too
    assert not taken(node_end=end + np.array([0, 90, 0, 0, 0], np.int32))  # more than its pages hold
    assert not taken(row_leaf=np.array([2, 1, 3, 4], np.int32))
    assert not taken(cu_seqlens_q=np.array([0, 1, 2, 3, 3], np.int32))
    assert not taken(node_first_slot=np.array([1, 0, 0, 0, 0], np.int32))
    assert not taken(node_pages=np.where(forest.node_pages == forest.node_pages[-1], -1, forest.node_pages))
    assert grown(last, forest, case.page_size, SharePolicy(1), "auto") is None
    assert grown(last, forest, case.page_size, POLICY, "closed") is None


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_steps_after_one_another_read_what_is_there_now(backend: str) -> None:
    """Requests are replaced and keep their slots, first pages and page counts, with other tails: nothing is stale."""
    last, pages = None, []
    for seed in range(6):
        case = Case(seed=seed, num_pages=256)
        root = case.node(-1, 21)
        for tokens in (5, 6, 5, 6):
            case.row(case.node(root, tokens + seed % 3))
        if seed % 2:  # the same places, other contents
            for node, old in zip(case.nodes, pages, strict=True):
                node.pages = old
        pages = [list(node.pages) for node in case.nodes]
        q = case.queries()
        last = plan(case.forest(), **case.shape(), backend=backend, gate="open", after=last)
        check_against_dense(case, q, last.run(q, *case.pools(), sm_scale=0.3), 0.3)


def test_a_step_that_is_no_forest_is_refused_after_a_good_one() -> None:
    case = group()
    last = plan(case.forest(), **case.shape())
    with pytest.raises(InvalidArgument, match="node_page_indptr"):
        plan(longer(case.forest(), np.array([0, 99, 0, 0, 0])), **case.shape(), after=last)


ALONE = """
import sys
sys.path[:] = [sys.argv[1]] + [path for path in sys.path if not path.endswith("src")]
import torch
import ramet.attention as attention
assert attention.__file__.startswith(sys.argv[1]), attention.__file__
v = torch.arange(4.0).view(1, 1, 4, 1)
ints = lambda *values: torch.tensor(values, dtype=torch.int32)
print(attention.decode_attention(torch.ones(1, 1, 1), (torch.ones_like(v), v), block_table=ints([0]), seq_lens=ints(3)))
"""


def test_the_library_runs_with_the_rest_of_the_package_deleted(tmp_path: Path) -> None:
    """``ramet.attention`` needs ``ramet.errors``, ``ramet.kernels`` and nothing else of the package."""
    source = Path(ramet.__file__).parent
    for name in ("attention", "kernels"):
        shutil.copytree(source / name, tmp_path / "ramet" / name)
    shutil.copy(source / "errors.py", tmp_path / "ramet")
    (tmp_path / "ramet" / "__init__.py").touch()
    command = [sys.executable, "-c", ALONE, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "1." in result.stdout


def test_one_plan_serves_all_layers_with_their_own_pools() -> None:
    case, other = group(), group()
    other.nodes[0].k, other.nodes[0].v = other.normal(21, 2, 8), other.normal(21, 2, 8)
    work = plan(case.forest(), **case.shape(), gate="open")
    q = case.queries()
    for layer in (case, other, case):
        check_against_dense(layer, q, work.run(q, *layer.pools(), sm_scale=0.3), 0.3)
