"""Configurations: both spellings of transformers, limits of the context, and one clear line for what is not read."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from ramet.errors import InvalidArgument, ModelError, RametError, Unsupported
from ramet.models.rope import Rope, RopeSpec, frequencies, interleave
from ramet.models.spec import spec_from_config

LLAMA: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    bos_token_id=1,
    eos_token_id=2,
)
SCALED = {"factor": 4.0, "original_max_position_embeddings": 512}


def test_old_and_new_spellings_of_rope_give_the_same_spec() -> None:
    old = LLAMA | dict(torch_dtype="bfloat16", rope_theta=5e5, rope_scaling=SCALED | {"type": "yarn"})
    new = LLAMA | dict(dtype="bfloat16", rope_parameters=SCALED | {"rope_type": "yarn", "rope_theta": 5e5})
    assert spec_from_config(old) == spec_from_config(new)
    assert spec_from_config(old).rope.theta == 5e5
    assert spec_from_config(old).rope.type == "yarn"


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    spec = spec_from_config({k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps")})
    assert (spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps) == (4, 16, 1e-6)
    assert (spec.rope.theta, spec.rope.type, spec.rope.rotary_dim) == (10000.0, "default", 16)
    assert not (spec.tie_word_embeddings or spec.attention_bias or spec.o_bias or spec.mlp_bias or spec.qk_norm)


@pytest.mark.parametrize(
    ("architecture", "switches"),
    [
        ("LlamaForCausalLM", (False, False, False)),
        ("MistralForCausalLM", (False, False, False)),
        ("Qwen2ForCausalLM", (True, False, False)),
        ("Qwen3ForCausalLM", (False, False, True)),
    ],
)
def test_families_differ_by_bias_and_head_norms(architecture: str, switches: tuple[bool, bool, bool]) -> None:
    spec = spec_from_config(LLAMA | {"architectures": [architecture]})
    assert (spec.attention_bias, spec.o_bias, spec.qk_norm) == switches


def test_generation_config_overrides_the_end_of_sequence_ids() -> None:
    assert spec_from_config(LLAMA).eos_token_ids == (2,)
    assert spec_from_config(LLAMA | {"eos_token_id": [7, 8, 7]}).eos_token_ids == (7, 8)
    assert spec_from_config(LLAMA, {"eos_token_id": [9, 2]}).eos_token_ids == (9, 2)
    assert spec_from_config(LLAMA, {"temperature": 0.7}).eos_token_ids == (2,)
    assert spec_from_config(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"architectures": ["LlamaForCausalLm"]}, Unsupported, "'LlamaForCausalLm'.*did you mean 'LlamaForCausalLM'"),
        ({"architectures": ["MixtralForCausalLM"]}, Unsupported, "'MixtralForCausalLM' is not supported.*Qwen3"),
        ({"architectures": None}, ModelError, "architectures is \\[\\]"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, ModelError, "must name one class"),
        ({"hidden_act": "gelu"}, Unsupported, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, Unsupported, "quantised \\(awq\\)"),
        ({"quantization_config": {"quant_method": "gptq"}}, Unsupported, "quantised \\(gptq\\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, Unsupported, "quantised \\(fp8\\)"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, Unsupported, "quantised \\(bitsandbytes\\)"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, Unsupported, "quantised \\(mxfp4\\)"),
        ({"rope_scaling": {"rope_type": "longrope"}}, Unsupported, "rope type 'longrope'.*yarn"),
        ({"rope_scaling": {"type": "mrope"}}, Unsupported, "rope type 'mrope'"),
        ({"rope_scaling": {"type": "linear"}}, ModelError, "factor is None"),
        ({"rope_scaling": 3}, ModelError, "rope_scaling is 3"),
        ({"partial_rotary_factor": 0.2}, ModelError, "3 of 16 dimensions are rotary"),
        ({"hidden_size": None}, ModelError, "hidden_size is None"),
        ({"num_hidden_layers": "two"}, ModelError, "num_hidden_layers is 'two'"),
        ({"rms_norm_eps": -1}, ModelError, "rms_norm_eps is -1"),
        ({"num_key_value_heads": 3}, ModelError, "num_attention_heads is 4, not a multiple"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, ModelError, "hidden_size is 64, not a multiple"),
        ({"eos_token_id": "</s>"}, ModelError, "eos_token_id is '</s>'"),
        ({"eos_token_id": [2, True]}, ModelError, "eos_token_id is \\[2, True\\]"),
        ({"num_hidden_layers": 10**30}, ModelError, "num_hidden_layers is 1000.*from 1 to 10,000"),
        ({"vocab_size": 2**31}, ModelError, "vocab_size is 2147483648"),
        ({"rms_norm_eps": float("nan")}, ModelError, "rms_norm_eps is nan"),
        ({"rope_theta": float("inf")}, ModelError, "rope_theta is inf"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}}, ModelError, "rope_theta is 1.0.*'yarn'"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, ModelError, "2 dimensions.*at least 4"),
        ({"rope_scaling": {"type": "llama3", **SCALED, "low_freq_factor": 4}}, ModelError, "low_freq_factor is 4.0"),
        ({"rope_parameters": {"frequency_factors": [1.0]}}, ModelError, "frequency_factors is .*a list of 8"),
        ({"rope_parameters": {"frequency_factors": [0.0] * 8}}, ModelError, "frequency_factors is 0.0"),
    ],
)
def test_what_is_not_read_is_named_in_one_line(changes: dict[str, Any], kind: type[RametError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        spec_from_config(LLAMA | changes)
    assert "\n" not in str(caught.value)


def test_an_end_outside_the_vocabulary_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ramet.models.spec"):
        assert spec_from_config(LLAMA | {"eos_token_id": [2, 100, -1]}).eos_token_ids == (2,)
    assert "[100, -1] is outside the vocabulary of 100 tokens" in caplog.text


def test_max_model_len_is_the_models_own_unless_asked_for_less() -> None:
    spec = spec_from_config(LLAMA)
    assert spec.limit_model_len(None) == 2048
    assert spec.limit_model_len(100) == 100
    with pytest.raises(InvalidArgument, match="max_model_len is 2049.*1 to 2048"):
        spec.limit_model_len(2049)


def test_a_stretched_context_may_be_asked_for() -> None:
    spec = spec_from_config(LLAMA | {"rope_scaling": SCALED | {"type": "dynamic"}, "max_position_embeddings": 512})
    assert spec.limit_model_len(None) == 512
    assert spec.limit_model_len(2048) == 2048
    with pytest.raises(InvalidArgument, match="1 to 2048"):
        spec.limit_model_len(2049)


def test_a_sliding_window_caps_the_context_and_refuses_more(caplog: pytest.LogCaptureFixture) -> None:
    spec = spec_from_config(LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 512})
    with caplog.at_level(logging.WARNING):
        assert spec.limit_model_len(None) == 512
    assert "capped at 512, the sliding window" in caplog.text
    assert spec.limit_model_len(512) == 512
    with pytest.raises(Unsupported, match="max_model_len is 513.*sliding_window=512"):
        spec.limit_model_len(513)


def test_a_window_that_is_off_or_unused_is_no_window() -> None:
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512}
    assert spec_from_config(qwen | {"use_sliding_window": False}).sliding_window is None
    assert spec_from_config(qwen | {"use_sliding_window": True}).sliding_window == 512
    unused = {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}
    assert spec_from_config(qwen | unused).sliding_window is None
    assert spec_from_config(LLAMA | {"sliding_window": None}).limit_model_len(None) == 2048


def neox(heads: torch.Tensor, positions: torch.Tensor, rotary_dim: int, theta: float) -> torch.Tensor:
    """Rotary embedding of Hugging Face layout in float64, written out."""
    half = rotary_dim // 2
    angles = positions.double()[:, None, None] * theta ** (-torch.arange(half).double() / half)
    first, second, rest = heads.double().split((half, half, heads.shape[-1] - rotary_dim), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [16, 8, 2])
def test_interleaved_rotation_is_the_rotation_of_hugging_face(rotary_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(5, 3, 16, generator=generator).to(dtype)
    positions = torch.tensor([0, 1, 7, 500, 3])
    rows = torch.cat([interleave(row.reshape(48), 16, rotary_dim)[None] for row in heads])
    rows = torch.cat((rows, torch.ones(5, 16, dtype=dtype)), dim=1)  # v comes after and is not turned
    rope = Rope(RopeSpec(theta=100.0, rotary_dim=rotary_dim), max_model_len=512)
    rope.at(positions, 3, 16, dtype).turn_(rows)
    expected = neox(heads, positions, rotary_dim, 100.0)
    expected = torch.stack([interleave(row.reshape(48), 16, rotary_dim) for row in expected])
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(rows[:, :48].double(), expected, rtol=0, atol=tolerance)
    assert (rows[:, 48:] == 1).all()


def test_dynamic_rope_is_unscaled_up_to_its_original_context() -> None:
    plain = frequencies(RopeSpec(theta=100.0, rotary_dim=16), 64)
    dynamic = RopeSpec(theta=100.0, rotary_dim=16, type="dynamic", factor=2.0, original_max_position=64)
    assert torch.equal(frequencies(dynamic, 64), plain)
    assert (frequencies(dynamic, 65)[1:] < plain[1:]).all()
