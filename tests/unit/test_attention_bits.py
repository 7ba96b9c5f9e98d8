"""Bits of a row that do not depend on its neighbours, as far as this machine's kernels go: samples must not change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_oracle import Case

from ramet.attention import plan

DTYPES = (torch.float32, torch.bfloat16)
HEADS = ((9, 3), (4, 4), (8, 1))
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 31, 64, 100, 257)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def attend(case: Case, q: torch.Tensor, gate: str = "open") -> torch.Tensor:
    return plan(case.forest(), **case.shape(), backend="cpu", gate=gate).run(q, *case.pools(), sm_scale=0.125)


def group(num_rows: int, heads: tuple[int, int], dtype: torch.dtype, tails: list[int]) -> Case:
    """A shared prompt of two nodes with ``num_rows`` samples. Seeds are equal: so are the first rows of two groups."""
    case = Case(heads, 64, 16, dtype, num_pages=4096)
    inner = case.node(case.node(-1, 100), 45, first_slot=4)
    for i in range(num_rows):
        case.row(case.node(inner, tails[i % len(tails)]))
    return case


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_however_many_rows_share_its_prompt(heads: tuple[int, int], dtype: torch.dtype) -> None:
    largest = group(max(ROWS), heads, dtype, [20])
    q = largest.queries()
    expected = attend(largest, q)
    for num_rows in ROWS:
        assert torch.equal(attend(group(num_rows, heads, dtype, [20]), q[:num_rows]), expected[:num_rows]), num_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_whatever_its_neighbours_lengths_are(dtype: torch.dtype) -> None:
    case = group(9, (9, 3), dtype, [20])
    q = case.queries()
    expected = attend(case, q)
    for lengths in ([1], [15, 16, 17], [100], [190, 200], [300, 20, 500]):
        other = group(1, (9, 3), dtype, [20])
        for length in (lengths * 8)[:8]:
            other.row(other.node(1, length))
        other.row(other.node(-1, 33), 12)  # and somebody prefills
        assert torch.equal(attend(other, torch.cat([q, q, q])[:21])[0], expected[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_in_chunks_and_token_by_token_gives_the_bits_of_one_prefill(dtype: torch.dtype) -> None:
    case = Case((9, 3), 64, 16, dtype)
    leaf = case.node(-1, 300)
    case.row(leaf, 300)
    q = case.queries()
    pools = case.pools()
    whole = attend(case, q, "closed")
    k, v, pages = case.nodes[leaf].k, case.nodes[leaf].v, case.nodes[leaf].pages
    for begin, end in ((0, 1), (0, 2), (0, 77), (77, 205), (205, 300), (255, 256), (299, 300)):
        node = case.nodes[leaf]
        node.k, node.v, node.pages = k[:end], v[:end], pages[: -(-end // 16)]
        case.rows = [(leaf, end - begin)]
        work = plan(case.forest(), **case.shape(), backend="cpu", gate="closed")
        assert torch.equal(work.run(q[begin:end], *pools, sm_scale=0.125), whole[begin:end]), (begin, end)


def test_reading_a_node_once_changes_only_the_rounding() -> None:
    """Sharing splits the sum over V at the node's end, so bits differ; nothing else does."""
    case = group(8, (9, 3), torch.float32, [20])
    q = case.queries()
    shared, alone = attend(case, q, "open"), attend(case, q, "closed")
    assert not torch.equal(shared, alone)
    assert (shared - alone).abs().max() < 1e-6
