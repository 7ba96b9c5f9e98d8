"""Shapes of ``ramet bench attention``: prompts, their samples, and the forests they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

import numpy as np

from ramet.attention import ForestArrays
from ramet.errors import InvalidArgument, nearest

MAX_GRID_ROWS = 1024


@dataclass(frozen=True)
class Shape:
    """One decode or verification step of one layer.

    Parameters
    ----------
    prompts, n : int
        Prompts, and rows below each.
    prompt_len : int
        Tokens of each prompt; 0 shares nothing.
    tail : int, default 256
        Tokens of each row's own, its query tokens among them.
    q_len : int, default 1
        Query tokens of a row.
    system_len : int, default 0
        Tokens that all prompts share, above them.
    num_qo_heads, num_kv_heads, head_dim, page_size : int

    Raises
    ------
    InvalidArgument
        A number out of range.
    """

    prompts: int
    n: int
    prompt_len: int
    tail: int = 256
    q_len: int = 1
    system_len: int = 0
    num_qo_heads: int = 28
    num_kv_heads: int = 4
    head_dim: int = 128
    page_size: int = 128

    def __post_init__(self) -> None:
        for field in fields(self):
            low = 0 if field.name in ("prompt_len", "system_len") else 1
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise InvalidArgument(f"{field.name} is {value!r}; allowed: an integer of at least {low}.")
        if self.q_len > self.tail:
            raise InvalidArgument(f"q_len is {self.q_len}; allowed: 1 to tail ({self.tail}), which holds the queries.")
        if self.num_qo_heads % self.num_kv_heads:
            raise InvalidArgument(
                f"num_qo_heads is {self.num_qo_heads}; it must be a multiple of num_kv_heads ({self.num_kv_heads})."
            )

    @property
    def rows(self) -> int:
        return self.prompts * self.n

    @property
    def context(self) -> int:
        """Tokens that a row attends to."""
        return self.system_len + self.prompt_len + self.tail

    @property
    def node_tokens(self) -> int:
        """Tokens of all nodes, each node once."""
        return self.system_len + self.prompts * self.prompt_len + self.rows * self.tail

    @property
    def name(self) -> str:
        """As in ``3x40 L4000 q1``; a system prompt of 2,048 tokens above is ``2048+8x16 L1024 q1``.

        Examples
        --------
        >>> Shape(3, 40, 4000).name, Shape(8, 16, 1024, system_len=2048, tail=100).name
        ('3x40 L4000 q1', '2048+8x16 L1024 t100 q1')
        """
        above = f"{self.system_len}+" if self.system_len else ""
        tail = "" if self.tail == 256 else f" t{self.tail}"
        return f"{above}{self.prompts}x{self.n} L{self.prompt_len}{tail} q{self.q_len}"

    def whole_pages(self) -> Shape:
        """The same step as engines with block tables hold it: prompts end at a page, the rest is in every tail.

        Examples
        --------
        >>> Shape(3, 40, 600).whole_pages().name
        '3x40 L512 t344 q1'
        """
        rest = (self.system_len + self.prompt_len) % self.page_size
        if self.system_len % self.page_size:
            raise InvalidArgument(f"system_len is {self.system_len}; whole pages need a multiple of {self.page_size}.")
        return replace(self, prompt_len=self.prompt_len - rest, tail=self.tail + rest)


def pages_of(shape: Shape) -> int:
    """Pages of all nodes."""
    return int(np.sum(-(-_node_tokens(shape) // shape.page_size)))


def _node_tokens(shape: Shape) -> np.ndarray:
    system = [shape.system_len] if shape.system_len else []
    prompts = [shape.prompt_len] * shape.prompts if shape.prompt_len else []
    return np.array(system + prompts + [shape.tail] * shape.rows, np.int64)


def forest_of(shape: Shape, pages: np.ndarray) -> ForestArrays:
    """The shape's forest: rows depth-first, every node in pages of its own.

    Parameters
    ----------
    shape : Shape
    pages : int array
        At least :func:`pages_of` distinct pages, in any order.
    """
    tokens = _node_tokens(shape)
    has_system, has_prompts = int(shape.system_len > 0), int(shape.prompt_len > 0)
    prompts = np.arange(shape.prompts) if has_prompts else np.zeros(0, np.int64)
    row_prompt = np.arange(shape.rows) // shape.n
    row_parent = has_system + row_prompt if has_prompts else np.full(shape.rows, has_system - 1)
    parent = np.concatenate([np.full(has_system, -1), np.full(len(prompts), has_system - 1), row_parent])
    start = np.concatenate(
        [
            np.zeros(has_system),
            np.full(len(prompts), shape.system_len),
            np.full(shape.rows, shape.system_len + shape.prompt_len),
        ]
    )
    indptr = np.append(0, np.cumsum(-(-tokens // shape.page_size)))

    def ints(values: np.ndarray) -> np.ndarray:
        return np.asarray(values).astype(np.int32)

    return ForestArrays(
        cu_seqlens_q=ints(np.arange(shape.rows + 1) * shape.q_len),
        row_leaf=ints(np.arange(shape.rows) + len(tokens) - shape.rows),
        node_parent=ints(parent),
        node_start=ints(start),
        node_end=ints(start + tokens),
        node_first_slot=ints(np.zeros(len(tokens))),
        node_page_indptr=ints(indptr),
        node_pages=ints(pages[: indptr[-1]]),
    )


_TABLE = (
    *((3, 40, length, 1) for length in (600, 1600, 4000, 6500, 16000)),
    (1, 64, 8000, 1),
    (1, 256, 8000, 1),
    (16, 16, 4000, 1),
    (32, 8, 1000, 1),
    (1, 4, 16000, 1),
    *((3, 40, length, q_len) for q_len in (4, 9) for length in (600, 1600, 4000)),
)
_GRID = ((1, 3, 16, 64), (1, 4, 16, 64, 256), (0, 128, 512, 2048, 8192, 32768), (1, 4, 9))
_MODEL = ((1, 64, 0, 1), (1, 32, 512, 1), (3, 40, 600, 1), (3, 40, 4000, 1), (16, 16, 4000, 1), (3, 40, 1600, 4))
PRESETS = ("table", "grid", "smollm2", "llama8b", "nested")


def preset(name: str, base: Shape) -> list[Shape]:
    """The shapes of a preset.

    Parameters
    ----------
    name : {"table", "grid", "smollm2", "llama8b", "nested"}
    base : Shape
        Its tail, heads and page size are kept, but by the presets that are named after a model.

    Raises
    ------
    InvalidArgument
        An unknown name.

    Examples
    --------
    >>> [shape.name for shape in preset("nested", Shape(1, 1, 0))]
    ['2048+8x16 L1024 q1', '8x16 L3072 q1']
    """
    if name not in PRESETS:
        raise InvalidArgument(
            f"there is no preset {name!r}{nearest(name, PRESETS)} It is one of: {', '.join(PRESETS)}."
        )
    heads = {
        "smollm2": {"num_qo_heads": 9, "num_kv_heads": 3, "head_dim": 64},
        "llama8b": {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    }
    base = replace(base, **heads.get(name, {}))
    if name == "nested":
        nested = replace(base, prompts=8, n=16, prompt_len=1024, system_len=2048)
        return [nested, one_level(nested)]
    found = {"table": _TABLE, "grid": _grid()}.get(name, _MODEL)
    return [replace(base, prompts=p, n=n, prompt_len=length, q_len=q, system_len=0) for p, n, length, q in found]


def one_level(shape: Shape) -> Shape:
    """The same rows with the system prompt in every prompt's own node."""
    return replace(shape, prompt_len=shape.system_len + shape.prompt_len, system_len=0)


def _grid() -> tuple[tuple[int, int, int, int], ...]:
    return tuple(entry for entry in product(*_GRID) if entry[0] * entry[1] <= MAX_GRID_ROWS)


def sample(shapes: Sequence[Shape], count: int, seed: int) -> list[Shape]:
    """Draw so many of the shapes, the same for the same seed; all of them where there are no more.

    Examples
    --------
    >>> grid = preset("grid", Shape(1, 1, 0))
    >>> len(grid), sample(grid, 2, seed=0) == sample(grid, 2, seed=0)
    (306, True)
    """
    if count < 1:
        raise InvalidArgument(f"sample is {count}; allowed: an integer of at least 1.")
    if count >= len(shapes):
        return list(shapes)
    chosen = np.random.default_rng(seed).choice(len(shapes), count, replace=False)
    return [shapes[i] for i in sorted(chosen.tolist())]
