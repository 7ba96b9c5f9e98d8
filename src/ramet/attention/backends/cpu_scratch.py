"""The tensors of the CPU backend's passes: views of scratch memory, made once per plan and dtype.

So a layer costs its operators and nothing else: no view is made, no index built, no memory allocated.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from ramet.attention.backends.cpu_layout import Item, Layout, Pass
from ramet.attention.problem import Problem

ALIGN = 32
"""Elements between two tensors' beginnings in scratch memory: 64 bytes or more."""


VALUE_BLOCK = 192
"""Float32 products sum over keys in blocks of 192, but halve a sum of 193 to 383, so padding it would move the middle.
We cut those ourselves."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the products: bf16 only where the CPU has instructions for it, never fp16, which is slow on all."""
    if dtype == torch.bfloat16:
        return dtype if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return torch.float32 if dtype == torch.float16 else dtype


def min_query_rows(dtype: torch.dtype, batch: int) -> int:
    """Query rows that every product has at least: products of fewer rows take other kernels, which give other bits.

    A product that is not part of a batch is cut into parts for the threads, and each part needs that many.
    """
    if dtype == torch.bfloat16:
        return 2
    return 4 if batch > 1 else 12


class BoundItem(NamedTuple):
    """An item's tensors. B is ``num_kv_heads * nodes``, M the query rows of a node, padded to :func:`min_query_rows`.

    ``rows`` and ``out_rows`` are ``scores`` and ``out`` without padding: ``[num_kv_heads, nodes, rows of a node,
    q_len * group, width or head_dim]``.
    """

    q_from: torch.Tensor | None  # copied to q_to first, where q is not a view of the pass's queries
    q_to: torch.Tensor
    q: torch.Tensor  # [B, M, head_dim]
    k_t: torch.Tensor  # [B, head_dim, width]
    v: torch.Tensor  # [B, width, head_dim], or its first keys
    scores: torch.Tensor  # [B, M, width]
    weights: torch.Tensor  # the scores, softmax done, of v's keys
    rest: tuple[torch.Tensor, torch.Tensor] | None  # weights and v of the other keys
    rows: torch.Tensor
    wide: torch.Tensor | None  # rows' place in the pass's score matrix; None: scores are that matrix
    hidden: torch.Tensor  # the scores from the first column on that some query must not see
    bias: torch.Tensor | None  # 0 and -inf for these
    out: torch.Tensor  # [B, M, head_dim]
    out_rows: torch.Tensor
    out_sum: torch.Tensor | None  # what out_rows are added to; None: out lies there


class BoundPass(NamedTuple):
    """A pass's tensors."""

    kv_index: torch.Tensor
    k_pool: torch.Tensor  # K and V as gathered, in the pool's dtype
    v_pool: torch.Tensor
    k: torch.Tensor  # the same in the products' dtype; the same tensors where these are equal
    v: torch.Tensor
    scores: torch.Tensor
    score_rows: torch.Tensor  # scores without padding, [num_kv_heads, rows, q_len * group, width]
    has_gaps: bool
    out: torch.Tensor  # [num_kv_heads, rows, q_len * group, head_dim]
    clear_out: bool
    lse: torch.Tensor  # [num_kv_heads, rows, q_len * group]
    items: list[BoundItem]


class Bound(NamedTuple):
    """All passes, with what they take from and give to the tokens: queries, outputs and lse of all passes in a row."""

    q: torch.Tensor  # [tokens * num_kv_heads, group * head_dim]
    out: torch.Tensor  # [tokens * num_kv_heads, group * head_dim]
    lse: torch.Tensor  # [tokens * num_kv_heads, group]
    passes: list[BoundPass]


class _Scratch:
    """Hands out pieces of one allocation; ``reset`` takes all of them back."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.memory = torch.empty(size, dtype=dtype)
        self.used = 0

    def reset(self) -> None:
        self.used = 0

    def take(self, *shape: int) -> torch.Tensor:
        begin, size = self.used, prod(shape)
        self.used += -(-size // ALIGN) * ALIGN
        return self.memory[begin : begin + size].view(shape)


class Binder:
    """Makes a :class:`Bound`. Passes run one after another, so they share one scratch memory."""

    def __init__(self, problem: Problem, plan: Layout, dtype: torch.dtype) -> None:
        self.layout, self.dtype, self.compute = plan, dtype, compute_dtype(dtype)
        self.heads, self.group, self.head_dim = problem.num_kv_heads, problem.group_size, problem.head_dim
        self.scratch = _Scratch(max(map(self._size, plan.passes)), self.compute)
        self.pool_scratch = _Scratch(0, dtype)
        if self.compute != dtype:
            self.pool_scratch = _Scratch(2 * max(len(p.kv_index) * self.head_dim + ALIGN for p in plan.passes), dtype)

    def bind(self) -> Bound:
        tokens = len(self.layout.query_index)
        q = torch.empty(tokens, self.group * self.head_dim, dtype=self.compute)
        out, lse = torch.empty_like(q), torch.empty(tokens, self.group)
        passes = []
        begin = 0
        for step in self.layout.passes:
            end = begin + self.heads * step.num_rows * step.q_len
            shape = (self.heads, step.num_rows, step.q_len * self.group)
            vectors = (*shape, self.head_dim)
            passes.append(
                self._pass(step, q[begin:end].view(vectors), out[begin:end].view(vectors), lse[begin:end].view(shape))
            )
            begin = end
        return Bound(q, out, lse, passes)

    def _matrices(self, step: Pass, item: Item) -> tuple[int, int, int]:
        """B, and M without and with padding."""
        m = item.num_rows // item.num_nodes * step.q_len * self.group
        batch = self.heads * item.num_nodes
        return batch, m, max(m, min_query_rows(self.compute, batch))

    def _size(self, step: Pass) -> int:
        """Elements of scratch memory that a pass needs at most."""
        size = 2 * len(step.kv_index) * self.head_dim
        size += self.heads * step.num_rows * step.q_len * self.group * step.width
        for item in step.items:
            batch, _, m = self._matrices(step, item)
            size += batch * m * (item.width + 2 * self.head_dim)
        return size + ALIGN * (3 + 3 * len(step.items))

    def _pass(self, step: Pass, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> BoundPass:
        self.scratch.reset()
        self.pool_scratch.reset()
        keys = (len(step.kv_index), self.head_dim)
        k, v = self.scratch.take(*keys), self.scratch.take(*keys)
        converts = self.compute != self.dtype
        k_pool = self.pool_scratch.take(*keys) if converts else k
        v_pool = self.pool_scratch.take(*keys) if converts else v
        first = step.items[0]
        alone = len(step.items) == 1 and first.num_rows == step.num_rows and first.width == step.width
        wide = None if alone else self.scratch.take(*q.shape[:3], step.width)
        items: list[BoundItem] = []
        at = 0
        for item in step.items:
            count = self.heads * item.num_nodes * item.width
            rows = slice(item.first_row, item.first_row + item.num_rows)
            columns = slice(item.column, item.column + item.width)
            items.append(
                self._item(
                    step,
                    item,
                    q[:, rows],
                    (k[at : at + count], v[at : at + count]),
                    None if wide is None else wide[:, rows, :, columns],
                    out[:, rows],
                    not items and item.num_rows == step.num_rows,
                )
            )
            at += count
        return BoundPass(
            kv_index=torch.from_numpy(step.kv_index),
            k_pool=k_pool,
            v_pool=v_pool,
            k=k,
            v=v,
            scores=items[0].scores if wide is None else wide,
            score_rows=items[0].rows.flatten(1, 2) if wide is None else wide,
            has_gaps=step.has_gaps,
            out=out,
            clear_out=items[0].out_sum is not None,
            lse=lse,
            items=items,
        )

    def _item(
        self,
        step: Pass,
        item: Item,
        q_rows: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        wide: torch.Tensor | None,
        out_rows: torch.Tensor,
        writes_first: bool,
    ) -> BoundItem:
        """``q_rows`` and ``out_rows`` are ``[num_kv_heads, the item's rows, q_len * group, head_dim]`` of the pass."""
        batch, m, padded = self._matrices(step, item)
        by_node = (self.heads, item.num_nodes, item.num_rows // item.num_nodes, step.q_len * self.group)
        vectors, width = (batch, padded, self.head_dim), item.width
        # Only neighbouring rows of the whole pass, without padding, are one batch of matrices as they lie.
        is_view = m == padded and (item.num_nodes == 1 or item.num_rows == step.num_rows)
        q = q_rows.view(vectors) if is_view else self.scratch.take(*vectors)
        direct = writes_first and is_view
        out = out_rows.view(vectors) if direct else self.scratch.take(*vectors)
        scores = self.scratch.take(batch, padded, width)
        rows = scores[:, :m].view(*by_node, width)
        target = rows if wide is None else wide.unflatten(1, by_node[1:3])
        bias, begin = self._bias(item, step.q_len)
        k, v = (part.view(batch, width, self.head_dim) for part in kv)
        halved = self.compute == torch.float32 and VALUE_BLOCK < width < 2 * VALUE_BLOCK
        cut = VALUE_BLOCK if halved else width
        return BoundItem(
            q_from=None if is_view else q_rows.unflatten(1, by_node[1:3]),
            q_to=q[:, :m].view(*by_node, self.head_dim),
            q=q,
            k_t=k.transpose(1, 2),
            v=v[:, :cut],
            scores=scores,
            weights=scores[..., :cut],
            rest=None if cut == width else (scores[..., cut:], v[:, cut:]),
            rows=rows,
            wide=None if wide is None else target,
            hidden=target.unflatten(3, (step.q_len, self.group))[..., begin:],
            bias=bias,
            out=out,
            out_rows=out[:, :m].view(*by_node, self.head_dim),
            out_sum=None if direct else out_rows.unflatten(1, by_node[1:3]),
        )

    def _bias(self, item: Item, q_len: int) -> tuple[torch.Tensor | None, int]:
        """0 where a query sees a key, -inf elsewhere, from the first column on where that matters."""
        begin = int(item.visible.min())
        if begin == item.width:
            return None, begin
        visible = torch.from_numpy(item.visible).view(1, item.num_nodes, -1, q_len, 1, 1)
        hidden = torch.arange(begin, item.width) >= visible
        return torch.zeros(hidden.shape, dtype=self.compute).masked_fill_(hidden, -torch.inf), begin
