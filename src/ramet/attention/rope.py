"""Rotary positions and the write of K and V in one call: one launch on a GPU."""

from __future__ import annotations

import torch

from ramet.errors import InvalidArgument

BLOCK_HEADS = 8


def rope_append_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    *,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool = False,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> torch.Tensor:
    """Norm (optionally) and turn q and k to their absolute positions; write k and v to their KV slots.

    The scaling of a model's positions (linear, NTK, YaRN, Llama 3) is in ``cos_sin``. Schemes that act on scores
    (ALiBi, relative biases) are not served.

    Parameters
    ----------
    q : Tensor [num_tokens, num_qo_heads, head_dim]
    k, v : Tensor [num_tokens, num_kv_heads, head_dim]
        Any strides but an innermost of 1.
    k_pool, v_pool : Tensor [num_pages, page_size, num_kv_heads, head_dim]
        Of the dtype of ``k``; written in place.
    positions : int64 Tensor [num_tokens]
        Absolute.
    slot_mapping : int64 Tensor [num_tokens]
        ``page * page_size + offset``. Negative: the token (of a padding row) is not written.
    cos_sin : float32 Tensor [positions, rotary_dim]
        Cosines, then sines, of each position. The head's elements behind rotary_dim stay as they are.
    interleaved : bool, default False
        Pairs are neighbours (2i, 2i + 1); otherwise (i, i + rotary_dim / 2).
    q_norm, k_norm : Tensor [head_dim], optional
        Weights of an RMS norm of every head, before it is turned.
    norm_eps : float, default 1e-6

    Returns
    -------
    Tensor [num_tokens, num_qo_heads, head_dim]
        q, turned; contiguous.

    Raises
    ------
    InvalidArgument
        Naming the argument, what it is and what it must be.

    Examples
    --------
    A quarter turn:

    >>> q, pool = torch.tensor([[[1.0, 0.0]]]), torch.zeros(1, 1, 1, 2)
    >>> out = rope_append_kv(q, q, q, pool, torch.zeros_like(pool), positions=torch.tensor([0]),
    ...                      slot_mapping=torch.tensor([0]), cos_sin=torch.tensor([[0.0, 1.0]]))
    >>> out.tolist(), pool.flatten().tolist()
    ([[[0.0, 1.0]]], [0.0, 1.0])
    """
    _check(q, k, v, k_pool, v_pool, positions, slot_mapping, cos_sin, q_norm, k_norm)
    if q.is_cuda:
        return _launch(q, k, v, k_pool, v_pool, positions, slot_mapping, cos_sin, interleaved, q_norm, k_norm, norm_eps)
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    out = _turned(q, cos, sin, interleaved, q_norm, norm_eps)
    written = slot_mapping >= 0
    page, offset = slot_mapping[written] // k_pool.shape[1], slot_mapping[written] % k_pool.shape[1]
    k_pool[page, offset] = _turned(k, cos, sin, interleaved, k_norm, norm_eps)[written]
    v_pool[page, offset] = v[written]
    return out


def _turned(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.float()
    rotary = 2 * cos.shape[-1]
    turned = wide[..., :rotary]
    one, two = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (one * cos - two * sin, two * cos + one * sin)
    both = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([both, wide[..., rotary:]], dim=-1).to(x.dtype)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> None:
    tokens, head_dim = q.shape[0], q.shape[-1]
    shapes: dict[str, tuple[torch.Tensor, tuple[int, ...], torch.dtype]] = {
        "q": (q, (tokens, *q.shape[1:2], head_dim), k.dtype),
        "k": (k, (tokens, *k.shape[1:2], head_dim), k_pool.dtype),
        "v": (v, tuple(k.shape), k_pool.dtype),
        "k_pool": (k_pool, (*k_pool.shape[:2], *k.shape[1:]), k.dtype),
        "v_pool": (v_pool, tuple(k_pool.shape), k.dtype),
        "positions": (positions, (tokens,), torch.int64),
        "slot_mapping": (slot_mapping, (tokens,), torch.int64),
        "cos_sin": (cos_sin, (*cos_sin.shape[:1], *cos_sin.shape[-1:]), torch.float32),
    }
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            shapes[name] = (weight, (head_dim,), weight.dtype)
    for name, (tensor, shape, dtype) in shapes.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != q.device:
            raise InvalidArgument(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; it must be {dtype} {shape} on "
                f"{q.device}."
            )
        if tensor.stride(-1) != 1 and tensor.numel() > 1:
            raise InvalidArgument(f"{name} has strides {tensor.stride()}; the innermost must be 1.")
    if cos_sin.shape[1] % 2 or not 0 < cos_sin.shape[1] <= head_dim or not cos_sin.is_contiguous():
        raise InvalidArgument(
            f"cos_sin has shape {tuple(cos_sin.shape)} and strides {cos_sin.stride()}; it must be contiguous, its "
            f"last dimension even and at most head_dim ({head_dim})."
        )


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_eps: float,
) -> torch.Tensor:
    from ramet.attention.kernels.rope_kv import rope_kv_kernel

    tokens, heads, head_dim = q.shape
    kv_heads, rotary = k.shape[1], cos_sin.shape[1]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    blocks = -(-heads // BLOCK_HEADS) + -(-kv_heads // BLOCK_HEADS)
    if tokens:
        rope_kv_kernel[(tokens, blocks)](
            *(q, k, v, out, k_pool, v_pool, positions, slot_mapping, cos_sin),
            *(q if q_norm is None else q_norm, k if k_norm is None else k_norm),
            *(norm_eps, k_pool.shape[0] * k_pool.shape[1]),
            *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *k_pool.stride()[:3], *v_pool.stride()[:3]),
            HEADS=heads,
            KV_HEADS=kv_heads,
            BLOCK_H=BLOCK_HEADS,
            D=head_dim,
            ROTARY=rotary,
            BLOCK_R=_power(rotary // 2),
            BLOCK_REST=_power(max(head_dim - rotary, 1)),
            BLOCK_D=_power(head_dim),
            PAGE=k_pool.shape[1],
            INTERLEAVED=interleaved,
            HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None,
            INTERPRET=not q.is_cuda,
            num_warps=2,
        )
    return out
