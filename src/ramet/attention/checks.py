"""Cheap checks of metadata: shapes, dtypes and ranges, never the contents of a pool."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch

from ramet.attention.problem import Problem
from ramet.attention.types import ForestArrays
from ramet.errors import InvalidArgument


def check_forest(forest: ForestArrays, page_size: int, window_left: int = -1) -> None:
    """Refuse arrays that are no forest.

    Pages that no row's window reaches may be evicted (negative).

    Raises
    ------
    InvalidArgument
        Naming the array, the first index that is wrong, its value and what is allowed.
    """
    check_shapes(forest)
    q_lens = forest.cu_seqlens_q[1:] - forest.cu_seqlens_q[:-1]
    if forest.cu_seqlens_q[0] != 0:
        raise InvalidArgument(f"cu_seqlens_q[0] is {forest.cu_seqlens_q[0]}; it must be 0.")
    _require(q_lens >= 0, "cu_seqlens_q", forest.cu_seqlens_q[1:], "offsets never decrease", 1)
    nodes = forest.num_nodes
    leaf, parent = forest.row_leaf, forest.node_parent
    _require((leaf >= 0) & (leaf < nodes), "row_leaf", leaf, f"a node from 0 to {nodes - 1}")
    _require(
        (parent >= -1) & (parent < np.arange(nodes)), "node_parent", parent, "-1, or a node that comes before its child"
    )
    start, end, first_slot = forest.node_start, forest.node_end, forest.node_first_slot
    _require(start >= 0, "node_start", start, "a position of at least 0")
    _require(end >= start, "node_end", end, "at least node_start")
    child = parent >= 0
    joined = ~child | (start == end[parent])
    _require(joined, "node_start", start, "a child starts where its parent ends")
    _require(
        (first_slot >= 0) & (first_slot < page_size), "node_first_slot", first_slot, f"a slot from 0 to {page_size - 1}"
    )
    _check_pages(forest, page_size, window_left)
    roots = _roots(forest)
    q_rows = q_lens <= end[leaf] - start[roots[leaf]]
    _require(q_rows, "cu_seqlens_q", q_lens, "a row has at most as many query tokens as its path has positions")


def check_shapes(forest: ForestArrays) -> None:
    """Refuse arrays of other kinds or lengths.

    Raises
    ------
    InvalidArgument
        Naming the array.
    """
    for field in fields(forest):
        array = getattr(forest, field.name)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
            raise InvalidArgument(f"{field.name} must be a one-dimensional NumPy array of integers.")
    lengths = {
        "cu_seqlens_q": forest.num_rows + 1,
        "row_leaf": forest.num_rows,
        "node_parent": forest.num_nodes,
        "node_start": forest.num_nodes,
        "node_end": forest.num_nodes,
        "node_first_slot": forest.num_nodes,
        "node_page_indptr": forest.num_nodes + 1,
        "node_pages": None,
    }
    for name, length in lengths.items():
        if length is not None and len(getattr(forest, name)) != length:
            raise InvalidArgument(f"{name} has {len(getattr(forest, name))} entries; it must have {length} here.")


def _check_pages(forest: ForestArrays, page_size: int, window_left: int) -> None:
    indptr = forest.node_page_indptr
    have = indptr[1:] - indptr[:-1]
    tokens = forest.node_end - forest.node_start
    need = -(-(forest.node_first_slot + tokens) // page_size) * (tokens > 0)
    if len(indptr) and (indptr[0] != 0 or indptr[-1] != len(forest.node_pages)):
        raise InvalidArgument(
            f"node_page_indptr runs from {indptr[0]} to {indptr[-1]}; it must run from 0 to {len(forest.node_pages)}, "
            "the length of node_pages."
        )
    _require(have >= need, "node_page_indptr", have, "pages for every position of the node")
    pages = forest.node_pages
    if len(pages) and pages.min() < 0:  # pages behind a node's last position may be anything: nothing reads them
        within = np.arange(len(pages)) - np.repeat(indptr[:-1], have)
        used = within < np.repeat(need, have)
        if window_left >= 0:
            first = first_visible(forest, window_left)
            used &= within >= np.repeat((forest.node_first_slot + first) // page_size, have)
        _require(~used | (pages >= 0), "node_pages", pages, "a page of at least 0; evicted pages cannot be read")


def first_visible(forest: ForestArrays, window_left: int) -> np.ndarray:
    """First token of each node that some row's window reaches, ``[nodes]``; the node's length where none does."""
    tokens = (forest.node_end - forest.node_start).astype(np.int64)
    q_lens = forest.cu_seqlens_q[1:] - forest.cu_seqlens_q[:-1]
    rows = np.flatnonzero(q_lens)
    node = forest.row_leaf[rows].astype(np.int64)
    low = forest.node_end[node].astype(np.int64) - q_lens[rows] - window_left
    lowest = np.full(forest.num_nodes, np.iinfo(np.int64).max)
    while len(node):  # one step up the paths of all rows at a time
        np.minimum.at(lowest, node, low)
        node = forest.node_parent[node].astype(np.int64)
        node, low = node[node >= 0], low[node >= 0]
    return np.clip(lowest - forest.node_start, 0, tokens)


def _roots(forest: ForestArrays) -> np.ndarray:
    """The root above every node, by pointer doubling: log2(depth) passes."""
    above = np.where(forest.node_parent >= 0, forest.node_parent, np.arange(forest.num_nodes))
    while True:
        higher = above[above]
        if np.array_equal(higher, above):
            return above
        above = higher


def _require(ok: np.ndarray, name: str, values: np.ndarray, allowed: str, first_index: int = 0) -> None:
    if not ok.all():
        index = int(np.argmin(ok))
        raise InvalidArgument(f"{name}[{index + first_index}] is {values[index]}; allowed: {allowed}.")


def check_tensors(
    problem: Problem,
    num_tokens: tuple[int, int],
    num_pages: int,
    strided: bool,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    """Refuse tensors that do not fit a plan.

    ``num_tokens`` are the fewest and the most tokens q may have, ``num_pages`` is the highest page the plan reads plus
    one; ``strided`` says that the backend reads pools of any strides.

    Raises
    ------
    InvalidArgument
        Naming the tensor, what it is and what it must be.
    """
    tail = (problem.num_qo_heads, problem.head_dim)
    pool_shape = (problem.page_size, problem.num_kv_heads, problem.head_dim)
    if (  # the usual case in as few steps as possible: this runs once per layer
        num_tokens[0] <= q.shape[0] <= num_tokens[1]
        and q.shape[1:] == tail
        and k_pool.shape == v_pool.shape
        and problem.v_head_dim is None
        and k_pool.shape[1:] == pool_shape
        and len(k_pool) >= num_pages
        and q.dtype == k_pool.dtype == v_pool.dtype
        and problem.dtype in (None, q.dtype)
        and problem.kv_dtype is None
        and q.device == k_pool.device == v_pool.device
        and k_pool.is_contiguous()
        and v_pool.is_contiguous()
        and (not strided or q.stride(2) == 1)
        and out is None
    ):
        return
    if q.ndim != 3 or q.shape[1:] != tail or not num_tokens[0] <= q.shape[0] <= num_tokens[1]:
        most = "" if num_tokens[0] == num_tokens[1] else f" (and up to {num_tokens[1]} tokens)"
        raise InvalidArgument(f"q has shape {tuple(q.shape)}; the plan was made for {(num_tokens[0], *tail)}{most}.")
    _check_pools(problem, num_pages, strided, q, k_pool, v_pool)
    if problem.dtype not in (None, q.dtype):
        raise InvalidArgument(f"q is {q.dtype}; the plan was made for {problem.dtype}.")
    if strided and q.stride(2) != 1:
        raise InvalidArgument(f"q has strides {q.stride()}; the innermost must be 1.")
    if out is not None:
        shape = (*q.shape[:2], problem.value_dim)
        if out.shape != shape:
            raise InvalidArgument(f"out has shape {tuple(out.shape)}; it must be {shape}, like q.")
        _check_like("out", out, q, q.dtype)
        if not out.is_contiguous():
            raise InvalidArgument(f"out has strides {out.stride()}; it must be contiguous.")


def _check_pools(
    problem: Problem, num_pages: int, strided: bool, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor
) -> None:
    for name, tensor, width in (("k_pool", k_pool, problem.head_dim), ("v_pool", v_pool, problem.value_dim)):
        pool_shape = (problem.page_size, problem.num_kv_heads, width)
        if tensor.ndim != 4 or tensor.shape[1:] != pool_shape:
            raise InvalidArgument(
                f"{name} has shape {tuple(tensor.shape)}; it must be [num_pages, page_size, num_kv_heads, head_dim] = "
                f"[num_pages, {pool_shape[0]}, {pool_shape[1]}, {pool_shape[2]}]."
            )
        if tensor.shape[0] < num_pages:
            raise InvalidArgument(f"{name} has {tensor.shape[0]} pages, but the plan reads page {num_pages - 1}.")
        _check_like(name, tensor, q, problem.kv_dtype or q.dtype)
        if not strided and not tensor.is_contiguous():
            raise InvalidArgument(
                f"{name} has strides {tensor.stride()}; it must be contiguous (no copy is made of it)."
            )
        _check_rows(name, tensor)


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise InvalidArgument(f"{name} has strides {tensor.stride()}; the innermost must be 1.")
    odd = [stride for stride in tensor.stride()[:-1] if stride * tensor.itemsize % 16]
    if tensor.device.type == "cuda" and (odd or tensor.data_ptr() % 16):
        raise InvalidArgument(
            f"{name} has strides {tensor.stride()} and begins at {tensor.data_ptr():#x}; "
            "rows must begin at multiples of 16 bytes."
        )


def _check_like(name: str, tensor: torch.Tensor, q: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        allowed = f" and q is {q.dtype}; convert one: they must be equal" if dtype == q.dtype else f"; allowed: {dtype}"
        raise InvalidArgument(f"{name} is {tensor.dtype}{allowed}.")
    if tensor.device != q.device:
        raise InvalidArgument(f"{name} is on {tensor.device} and q on {q.device}; both must be on one device.")


def check_scalars(
    problem: Problem, q: torch.Tensor, sm_scale: float | torch.Tensor, sinks: torch.Tensor | None
) -> None:
    """Refuse a scale or sinks that do not fit a plan.

    Raises
    ------
    InvalidArgument
        Naming the argument, what it is and what it must be.
    """
    if isinstance(sm_scale, torch.Tensor):
        if sm_scale.dtype != torch.float32 or sm_scale.numel() != 1 or sm_scale.device != q.device:
            raise InvalidArgument(
                f"sm_scale is {sm_scale.dtype} {tuple(sm_scale.shape)} on {sm_scale.device}; it must be a float, or "
                f"one float32 element on {q.device}."
            )
    elif not isinstance(sm_scale, int | float):
        raise InvalidArgument(f"sm_scale is {sm_scale!r}; it must be a float or a tensor with one element.")
    if (sinks is not None) != problem.has_sinks:
        given = "given" if sinks is not None else "missing"
        raise InvalidArgument(f"sinks are {given}, but the plan was made with has_sinks={problem.has_sinks}.")
    if sinks is not None and (
        sinks.dtype != torch.float32 or sinks.shape != (problem.num_qo_heads,) or sinks.device != q.device
    ):
        raise InvalidArgument(
            f"sinks are {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}; they must be float32 "
            f"({problem.num_qo_heads},) on {q.device}."
        )


def check_dynamic(
    problem: Problem,
    num_rows: int,
    num_entries: int,
    q: torch.Tensor,
    out_scale: float | torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    page_lists: torch.Tensor | None,
) -> None:
    """Refuse a factor of the output, lengths or page lists that do not fit a plan of so many rows and page entries.

    Raises
    ------
    InvalidArgument
        Naming the argument, what it is and what it must be.
    """
    for name, value, wanted in (
        ("out_scale", out_scale, problem.has_out_scale),
        ("seq_lens", seq_lens, problem.has_seq_lens),
        ("page_lists", page_lists, problem.has_page_lists),
    ):
        if (value is not None) != wanted:
            given = "given" if value is not None else "missing"
            raise InvalidArgument(f"{name} is {given}, but the plan was made with has_{name}={wanted}.")
    if isinstance(out_scale, torch.Tensor):
        _check_vector("out_scale", out_scale, torch.float32, 1, q)
    elif out_scale is not None and not isinstance(out_scale, int | float):
        raise InvalidArgument(f"out_scale is {out_scale!r}; it must be a float or a tensor with one element.")
    if seq_lens is not None:
        _check_vector("seq_lens", seq_lens, torch.int32, num_rows, q)
    if page_lists is not None:
        _check_vector("page_lists", page_lists, torch.int32, num_entries, q)


def _check_vector(name: str, tensor: torch.Tensor, dtype: torch.dtype, length: int, q: torch.Tensor) -> None:
    if tensor.dtype != dtype or tensor.numel() != length or tensor.device != q.device or not tensor.is_contiguous():
        raise InvalidArgument(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; it must be contiguous {dtype} with "
            f"{length} elements on {q.device}."
        )
