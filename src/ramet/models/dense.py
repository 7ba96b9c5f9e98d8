"""The dense decoder: Llama, Mistral, Qwen2 and Qwen3 differ by biases and q/k norms only."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ramet.models.layers import MIN_ROWS, Linear, RMSNorm, padded, silu_mul
from ramet.models.rope import Rope, interleave
from ramet.models.spec import ModelSpec
from ramet.models.weights import WeightSource

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]``. q, k and v are views of one buffer (row
stride (Hq + 2 Hkv) D, innermost 1) that the model does not touch again; the attention writes k and v where it likes."""


class Layer:
    """One block: its packed weights, fused so that a block is four GEMMs."""

    def __init__(self, spec: ModelSpec, index: int, source: WeightSource, dtype: torch.dtype) -> None:
        prefix = f"model.layers.{index}."

        def read(name: str) -> Tensor:
            return source.read(prefix + name).to(dtype)

        def fused(names: list[str], suffix: str) -> Tensor:
            rows = [read(f"{name}.{suffix}") for name in names]
            for i, name in enumerate(names):
                if name in ("self_attn.q_proj", "self_attn.k_proj"):
                    rows[i] = interleave(rows[i], spec.head_dim, spec.rope.rotary_dim)
            return torch.cat(rows)

        def linear(names: list[str], bias: bool) -> Linear:
            return Linear(fused(names, "weight"), fused(names, "bias") if bias else None)

        def head_norm(name: str) -> RMSNorm:
            weight = interleave(read(f"self_attn.{name}.weight"), spec.head_dim, spec.rope.rotary_dim)
            return RMSNorm(weight, spec.rms_norm_eps)

        self.qkv = linear([f"self_attn.{name}_proj" for name in "qkv"], spec.attention_bias)
        self.o = linear(["self_attn.o_proj"], spec.o_bias)
        self.gate_up = linear(["mlp.gate_proj", "mlp.up_proj"], spec.mlp_bias)
        self.down = linear(["mlp.down_proj"], spec.mlp_bias)
        self.input_norm = RMSNorm(read("input_layernorm.weight").clone(), spec.rms_norm_eps)
        self.post_norm = RMSNorm(read("post_attention_layernorm.weight").clone(), spec.rms_norm_eps)
        self.q_norm = head_norm("q_norm") if spec.qk_norm else None
        self.k_norm = head_norm("k_norm") if spec.qk_norm else None


class DenseDecoder:
    """Token ids to hidden states to logits; attention is the caller's, so the model knows nothing of pages.

    A row's result does not depend on which rows it is computed with, bit for bit (float32 and bfloat16).

    Parameters
    ----------
    spec : ModelSpec
    source : WeightSource
        Read one tensor at a time; only packed copies are kept.
    dtype : torch.dtype
        float32 or bfloat16, of weights and activations.
    max_model_len : int
        Positions to prepare.

    Examples
    --------
    >>> hidden = model.forward(token_ids, positions, attend)  # doctest: +SKIP
    >>> logits = model.logits(hidden[-1:])  # doctest: +SKIP
    """

    def __init__(self, spec: ModelSpec, source: WeightSource, *, dtype: torch.dtype, max_model_len: int) -> None:
        self.spec = spec
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.rope = Rope(spec.rope, max_model_len)
        self.embedding = source.read("model.embed_tokens.weight").to(dtype).clone()
        self.layers = [Layer(spec, index, source, dtype) for index in range(spec.num_layers)]
        self.norm = RMSNorm(source.read("model.norm.weight").to(dtype).clone(), spec.rms_norm_eps)
        tied = spec.tie_word_embeddings
        self.head = Linear(self.embedding if tied else source.read("lm_head.weight").to(dtype))

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the hidden states after the final norm, ``[T, hidden_size]`` in the model's dtype.

        Parameters
        ----------
        token_ids, positions : int64 [T]
            Positions are absolute and below ``max_model_len``.
        attend : callable
            See :data:`Attend`; called once per layer, in order.

        Notes
        -----
        The result is an inference tensor: change it in place only under ``torch.inference_mode()``.
        """
        spec = self.spec
        tokens, q_heads, heads = len(token_ids), spec.num_qo_heads, spec.num_qo_heads + 2 * spec.num_kv_heads
        head_counts = (q_heads, spec.num_kv_heads, spec.num_kv_heads)
        turned = q_heads + spec.num_kv_heads
        x = padded(F.embedding(token_ids, self.embedding))
        factors = self.rope.at(positions)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.input_norm(x))[:tokens].view(tokens, heads, spec.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                qkv[:, :q_heads] = layer.q_norm(qkv[:, :q_heads])
                qkv[:, q_heads:turned] = layer.k_norm(qkv[:, q_heads:turned])
            self.rope.turn_(qkv[:, :turned], factors)
            q, k, v = qkv.split(head_counts, dim=1)
            x = layer.o.add(padded(attend(index, q, k, v).reshape(tokens, -1)), x)
            x = layer.down.add(silu_mul(layer.gate_up(layer.post_norm(x))), x)
        return self.norm(x)[:tokens]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 ``[M, vocab_size]`` for ``hidden [M, hidden_size]``."""
        rows = len(hidden)
        return self.head(padded(hidden))[:rows].float()


__all__ = ["MIN_ROWS", "Attend", "DenseDecoder"]
