"""The dense decoder: Llama, Mistral, Qwen2 and Qwen3 differ by biases and q/k norms only."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ramet.models.layers import Linear, RMSNorm, absorb_norm, padded, silu_mul, unit_rows, widen, with_eps_column
from ramet.models.rope import Rope, interleave
from ramet.models.spec import ModelSpec
from ramet.models.weights import WeightSource

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]``. q, k and v are views of one buffer (row
stride (Hq + 2 Hkv) D, innermost 1) that the model does not touch again; the attention writes k and v where it likes."""


class Layer:
    """One block: its packed weights, fused and with the norms absorbed, so that a block is four GEMMs."""

    def __init__(self, spec: ModelSpec, index: int, source: WeightSource, dtype: torch.dtype) -> None:
        prefix = f"model.layers.{index}."
        attention = [f"self_attn.{name}_proj" for name in "qkv"]
        feed_forward = ["mlp.gate_proj", "mlp.up_proj"]

        def read(name: str) -> Tensor:
            return source.read(prefix + name)

        def rows(name: str, suffix: str) -> Tensor:
            value = read(f"{name}.{suffix}")
            paired = name in attention[:2]
            return interleave(value, spec.head_dim, spec.rope.rotary_dim) if paired else value

        def fused(names: list[str], norm: str, bias: bool) -> Linear:
            weight = absorb_norm(torch.cat([rows(name, "weight") for name in names]), read(f"{norm}.weight"))
            biases = torch.cat([rows(name, "bias") for name in names]).to(dtype) if bias else None
            return Linear(weight.to(dtype), biases)

        def into_stream(name: str, bias: bool) -> Linear:
            biases = widen(read(f"{name}.bias")).to(dtype) if bias else None
            return Linear(widen(read(f"{name}.weight")).to(dtype), biases)

        def norm_of_heads(name: str) -> RMSNorm:
            weight = interleave(read(f"self_attn.{name}.weight"), spec.head_dim, spec.rope.rotary_dim)
            return RMSNorm(weight.to(dtype), spec.rms_norm_eps)

        self.qkv = fused(attention, "input_layernorm", spec.attention_bias)
        self.o = into_stream("self_attn.o_proj", spec.o_bias)
        self.gate_up = fused(feed_forward, "post_attention_layernorm", spec.mlp_bias)
        self.down = into_stream("mlp.down_proj", spec.mlp_bias)
        self.head_norm = HeadNorm(spec, norm_of_heads("q_norm"), norm_of_heads("k_norm")) if spec.qk_norm else None


class HeadNorm:
    """RMSNorm over each head of q and k, in place (Qwen3)."""

    def __init__(self, spec: ModelSpec, q_norm: RMSNorm, k_norm: RMSNorm) -> None:
        self.head_dim, self.q_heads, self.end = spec.head_dim, spec.num_qo_heads, spec.num_qo_heads + spec.num_kv_heads
        self.q_norm, self.k_norm = q_norm, k_norm

    def __call__(self, qkv: Tensor) -> None:
        heads = qkv.view(len(qkv), -1, self.head_dim)
        q, k = heads[:, : self.q_heads], heads[:, self.q_heads : self.end]
        q.copy_(self.q_norm(q))
        k.copy_(self.k_norm(k))


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
        embedding = source.read("model.embed_tokens.weight").to(dtype)
        head = embedding if spec.tie_word_embeddings else source.read("lm_head.weight").to(dtype)
        self.embedding = with_eps_column(embedding, spec.rms_norm_eps)
        self.layers = [Layer(spec, index, source, dtype) for index in range(spec.num_layers)]
        self.norm = RMSNorm(source.read("model.norm.weight").to(dtype), spec.rms_norm_eps)
        self.head = Linear(head)

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
        tokens, head_dim = len(token_ids), spec.head_dim
        counts = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
        turned = spec.num_qo_heads + spec.num_kv_heads
        x = F.embedding(padded(token_ids), self.embedding)
        ones = x.new_ones((len(x), 1))
        attended = x.new_zeros((len(x), spec.num_qo_heads * head_dim)) if len(x) > tokens else None
        rotation = self.rope.at(positions, turned, head_dim, self.dtype)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(unit_rows(x, ones))[:tokens]
            if layer.head_norm is not None:
                layer.head_norm(qkv)
            rotation.turn_(qkv)
            q, k, v = qkv.view(tokens, -1, head_dim).split_with_sizes(counts, 1)
            rows = attend(index, q, k, v).reshape(tokens, -1)
            if attended is not None:  # the added rows stay zero
                attended[:tokens] = rows
                rows = attended
            x = layer.o.add(rows, x)
            x = layer.down.add(silu_mul(layer.gate_up(unit_rows(x, ones))), x)
        return self.norm(x[:tokens, : spec.hidden_size])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 ``[M, vocab_size]`` for ``hidden [M, hidden_size]``."""
        return self.head(padded(hidden))[: len(hidden)].float()
