"""What a model is, read from its configuration: one frozen :class:`ModelSpec` for every supported family."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ramet.errors import InvalidArgument, ModelError, Unsupported, nearest, shown
from ramet.models.rope import ROPE_TYPES, RopeSpec

logger = logging.getLogger(__name__)

MAX_LAYERS = 10_000
"""More is surely a mistake, and would keep us busy making names of weights."""


class Family(NamedTuple):
    """What tells an architecture from the others; the rest is in the configuration."""

    qkv_bias: bool = False
    qk_norm: bool = False
    biases_configurable: bool = False  # attention_bias (q, k, v and o) and mlp_bias are read
    window_needs_switch: bool = False  # sliding_window counts only with use_sliding_window


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(biases_configurable=True),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window_needs_switch=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, biases_configurable=True, window_needs_switch=True),
}


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and switches of a dense decoder.

    Parameters
    ----------
    architecture : str
        Hugging Face class name, for example ``LlamaForCausalLM``.
    vocab_size, hidden_size, intermediate_size, num_layers, num_qo_heads, num_kv_heads, head_dim : int
    rms_norm_eps : float
    rope : RopeSpec
    max_position_embeddings : int
        Context length of the configuration, in tokens: the default of ``max_model_len``.
    tie_word_embeddings : bool
        The output head is the embedding.
    attention_bias, o_bias, mlp_bias : bool
        Bias of q, k and v; of the attention's output; of the feed-forward linears.
    qk_norm : bool
        RMSNorm over each head of q and k before the rotary embedding (Qwen3).
    sliding_window : int, optional
        Tokens a query sees, itself included, in at least one layer; None for full attention.
    eos_token_ids : tuple of int
        Every id that ends a sample; ``generation_config.json`` overrides ``config.json``.
    bos_token_id : int, optional
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def limit_model_len(self, requested: int | None) -> int:
        """Return the ``max_model_len`` to use: the request, or the model's own limit.

        Windowed attention is not implemented, but a text that fits the window is the same with full attention: the
        default is capped at the window, and the cap logged.

        Raises
        ------
        InvalidArgument
            If the request is longer than the positions the model has.
        Unsupported
            If the request is longer than the model's sliding window.
        """
        window = self.sliding_window
        if requested is None:
            if window is None or window >= self.max_position_embeddings:
                return self.max_position_embeddings
            logger.warning(
                "max_model_len is capped at %d, the sliding window of this model (context %d): sliding-window "
                "attention is not supported.",
                window,
                self.max_position_embeddings,
            )
            return window
        limit = self.max_position_embeddings
        if self.rope.type in ("linear", "dynamic", "yarn"):
            limit = max(limit, math.floor(self.rope.original_max_position * self.rope.factor))
        if requested > limit:
            raise InvalidArgument(
                f"max_model_len is {requested}, but the model has {limit} positions; allowed: 1 to {limit}."
            )
        if window is not None and requested > window:
            raise Unsupported(
                f"max_model_len is {requested}, but the model uses sliding-window attention (sliding_window={window}),"
                f" which is not supported; allowed: 1 to {window}, where it equals full attention."
            )
        return requested


def spec_from_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read a :class:`ModelSpec` from a Hugging Face ``config.json`` (transformers 4 or 5 spelling).

    Raises
    ------
    Unsupported
        For an architecture, rope type, activation or quantisation that is not read; the message names it.
    ModelError
        For a missing or impossible value; the message names the key.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    _refuse_quantized(config)
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise Unsupported(f"config.json: hidden_act is {shown(activation)}; only 'silu' is supported.")
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    kv_heads = _integer(config, "num_key_value_heads", heads)
    if config.get("head_dim") is None and hidden % heads:
        raise ModelError(f"config.json: hidden_size is {hidden}, not a multiple of num_attention_heads, {heads}.")
    head_dim = _integer(config, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads is {heads}, not a multiple of num_key_value_heads, {kv_heads}."
        )
    positions, vocab_size = _integer(config, "max_position_embeddings"), _integer(config, "vocab_size")
    has_bias = family.biases_configurable and bool(config.get("attention_bias"))
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers", most=MAX_LAYERS),
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, head_dim, positions),
        max_position_embeddings=positions,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=family.qkv_bias or has_bias,
        o_bias=has_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias")),
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(config, family),
        eos_token_ids=_eos(config, generation_config or {}, vocab_size),
        bos_token_id=config.get("bos_token_id"),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(
            f"config.json: architectures is {shown(names)}; it must name one class, such as 'LlamaForCausalLM'."
        )
    if names[0] not in FAMILIES:
        raise Unsupported(
            f"architecture {shown(names[0])} is not supported{nearest(names[0], FAMILIES)} "
            f"Supported: {', '.join(FAMILIES)}."
        )
    return names[0]


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise Unsupported(
            f"the weights are quantised ({method}), which is not read: use the model's float16, bfloat16 or float32 "
            "weights, or a GGUF file."
        )


def _integer(config: Mapping[str, Any], key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(f"config.json: {key} is {shown(value)}; it must be an integer from 1 to {most:,}.")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ModelError(f"config.json: {key} is {shown(value)}; it must be a positive number.")
    return float(value)


def _rope(config: Mapping[str, Any], head_dim: int, positions: int) -> RopeSpec:
    parameters: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):  # transformers 4, transformers 5
        given = config.get(key) or {}
        if not isinstance(given, Mapping):
            raise ModelError(f"config.json: {key} is {shown(given)}; it must be an object.")
        parameters.update(given)
    parameters.setdefault("rope_theta", config.get("rope_theta"))
    parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise Unsupported(f"rope type {shown(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}.")
    original = _integer(parameters, "original_max_position_embeddings", positions)
    rotary_dim = int(min(head_dim * _number(parameters, "partial_rotary_factor", 1.0), 2**31))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ModelError(f"config.json: {rotary_dim} of {head_dim} dimensions are rotary; it must be an even number.")
    factor = 1.0 if kind == "default" else _number(parameters, "factor")
    rope = RopeSpec(
        theta=_number(parameters, "rope_theta", 10000.0),
        rotary_dim=rotary_dim,
        type=kind,
        factor=factor,
        original_max_position=original,
        attention_factor=_attention_factor(parameters, factor) if kind == "yarn" else 1.0,
        beta_fast=_number(parameters, "beta_fast", 32.0),
        beta_slow=_number(parameters, "beta_slow", 1.0),
        truncate=bool(parameters.get("truncate", True)),
        low_freq_factor=_number(parameters, "low_freq_factor", 1.0),
        high_freq_factor=_number(parameters, "high_freq_factor", 4.0),
        frequency_factors=_frequency_factors(parameters, rotary_dim),
    )
    _check_rope(rope)
    return rope


def _check_rope(rope: RopeSpec) -> None:
    """Refuse numbers that the formulas of their rope type divide by, or take the logarithm of."""
    if rope.type == "dynamic" and rope.rotary_dim < 4:
        raise ModelError(f"config.json: {rope.rotary_dim} dimensions are rotary; rope type 'dynamic' needs at least 4.")
    if rope.type in ("dynamic", "yarn") and rope.theta <= 1:
        raise ModelError(f"config.json: rope_theta is {rope.theta}; rope type {rope.type!r} needs more than 1.")
    if rope.type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ModelError(
            f"config.json: low_freq_factor is {rope.low_freq_factor}; it must be below high_freq_factor, "
            f"{rope.high_freq_factor}."
        )


def _frequency_factors(parameters: Mapping[str, Any], rotary_dim: int) -> tuple[float, ...]:
    factors = parameters.get("frequency_factors") or []
    if not isinstance(factors, list) or len(factors) not in (0, rotary_dim // 2):
        raise ModelError(
            f"config.json: frequency_factors is {shown(factors)}; it must be a list of {rotary_dim // 2} numbers."
        )
    return tuple(_number({"frequency_factors": factor}, "frequency_factors") for factor in factors)


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """YaRN's factor of cos and sin: given, or derived from the stretch (and mscale, where a model has it)."""
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(_number(parameters, "mscale")) / scale(_number(parameters, "mscale_all_dim"))
    return scale(1.0)


def _sliding_window(config: Mapping[str, Any], family: Family) -> int | None:
    if config.get("sliding_window") is None:
        return None
    if family.window_needs_switch and not config.get("use_sliding_window"):
        return None
    layer_types = config.get("layer_types")
    if layer_types and "sliding_attention" not in layer_types:
        return None
    return _integer(config, "sliding_window")


def _eos(config: Mapping[str, Any], generation_config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    ids = generation_config.get("eos_token_id")
    ids = config.get("eos_token_id") if ids is None else ids
    if ids is None:
        return ()
    ids = [ids] if isinstance(ids, int) else ids
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"eos_token_id is {shown(ids)}; it must be an integer or a list of integers.")
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        logger.warning("eos_token_id %s is outside the vocabulary of %d tokens: left out.", shown(outside), vocab_size)
    return tuple(dict.fromkeys(i for i in ids if i not in outside))
