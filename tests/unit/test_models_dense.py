"""The dense decoder against transformers, on random small checkpoints of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_oracle import PlainAttention, save_checkpoint

from ramet.config import EngineConfig
from ramet.models.registry import LoadedModel, load_model

transformers = pytest.importorskip("transformers")

VOCAB = 199
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    rms_norm_eps=1e-5,
)
THETA = {"rope_theta": 5000.0}
LLAMA3 = THETA | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_TUNED = YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.3, "mscale_all_dim": 0.7, "truncate": False}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-mha-wide-heads": ("Llama", dict(num_key_value_heads=6, head_dim=16)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-llama3-rope": ("Llama", dict(rope_parameters=LLAMA3)),
    "llama-linear-rope": ("Llama", dict(rope_parameters=THETA | {"rope_type": "linear", "factor": 3.0})),
    "llama-yarn-rope": ("Llama", dict(rope_parameters=YARN)),
    "llama-yarn-tuned-rope": ("Llama", dict(rope_parameters=YARN_TUNED)),
    "llama-dynamic-rope": ("Llama", dict(rope_parameters=THETA | {"rope_type": "dynamic", "factor": 4.0})),
    "mistral": ("Mistral", dict(sliding_window=None, rope_parameters=THETA)),
    "mistral-head-dim": ("Mistral", dict(sliding_window=None, head_dim=12)),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True, rope_parameters=THETA)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3-tied": ("Qwen3", dict(head_dim=8, tie_word_embeddings=True, rope_parameters=YARN)),
}


def make_config(family: str, **changes: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(
        **(SMALL | {"head_dim": 8, "tie_word_embeddings": False} | changes)
    )
    config.architectures = [f"{family}ForCausalLM"]
    return config


def our_logits(loaded: LoadedModel, token_ids: torch.Tensor) -> torch.Tensor:
    attend = PlainAttention(loaded.spec)
    hidden = loaded.model.forward(token_ids, torch.arange(len(token_ids)), attend)
    return loaded.model.logits(hidden)


def their_logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(token_ids[None]).logits[0].double()


def check_precision(folder: Path, truth_model: Any, token_ids: torch.Tensor, dtype: str) -> None:
    """Our error against float64 is at most twice that of transformers in the same precision."""
    loaded = load_model(EngineConfig(model=str(folder), dtype=dtype))
    truth = their_logits(truth_model, token_ids)
    same = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    allowed = 2 * (their_logits(same, token_ids) - truth).abs().max().item()
    error = (our_logits(loaded, token_ids).double() - truth).abs().max().item()
    assert truth.std() > 0.5, "a flat truth would prove nothing"
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    truth_model = save_checkpoint(tmp_path, make_config(family, **changes), seed=sorted(CASES).index(case))
    token_ids = torch.randint(0, VOCAB, (97,), generator=torch.Generator().manual_seed(5))
    check_precision(tmp_path, truth_model, token_ids, "float32")


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_bfloat16_logits_are_as_precise_as_those_of_transformers(family: str, tmp_path: Path) -> None:
    truth_model = save_checkpoint(tmp_path, make_config(family, sliding_window=None), seed=17)
    token_ids = torch.randint(0, VOCAB, (97,), generator=torch.Generator().manual_seed(6))
    check_precision(tmp_path, truth_model, token_ids, "bfloat16")


def test_sharded_checkpoint_equals_transformers(tmp_path: Path) -> None:
    truth_model = save_checkpoint(tmp_path, make_config("Llama"), seed=3, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_precision(tmp_path, truth_model, torch.arange(40), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_torch_without_onednn_computes_the_same(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth_model = save_checkpoint(tmp_path, make_config("Qwen2"), seed=12)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not load_model(EngineConfig(model=str(tmp_path), dtype=dtype)).model.head.packed
    check_precision(tmp_path, truth_model, torch.arange(60), dtype)


def test_dynamic_rope_beyond_its_context_equals_transformers_at_full_length(tmp_path: Path) -> None:
    rope = THETA | {"rope_type": "dynamic", "factor": 4.0}
    config = make_config("Llama", rope_parameters=rope, max_position_embeddings=64)
    truth_model = save_checkpoint(tmp_path, config, seed=4)
    token_ids = torch.arange(150) % VOCAB
    loaded = load_model(EngineConfig(model=str(tmp_path), dtype="float32", max_model_len=150))
    difference = our_logits(loaded, token_ids).double() - their_logits(truth_model, token_ids)
    assert difference.abs().max() < 1e-4


def test_a_prompt_in_chunks_gives_the_same_logits(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_config("Qwen3", head_dim=16), seed=9)
    loaded = load_model(EngineConfig(model=str(tmp_path), dtype="float32"))
    token_ids = torch.randint(0, VOCAB, (50,), generator=torch.Generator().manual_seed(8))
    whole, attend, parts = our_logits(loaded, token_ids), PlainAttention(loaded.spec), []
    for first, last in ((0, 1), (1, 3), (3, 33), (33, 34), (34, 50)):
        parts.append(loaded.model.forward(token_ids[first:last], torch.arange(first, last), attend))
    torch.testing.assert_close(loaded.model.logits(torch.cat(parts)), whole, rtol=0, atol=2e-5)


def test_attend_sees_every_layer_once_with_its_shapes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_config("Llama"), seed=2)
    loaded = load_model(EngineConfig(model=str(tmp_path), dtype="float32"))
    seen: list[tuple[int, ...]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((layer, *q.shape, *k.shape, *v.shape))
        return torch.zeros_like(q)

    hidden = loaded.model.forward(torch.arange(5), torch.arange(5), attend)
    assert seen == [(layer, 5, 6, 8, 5, 2, 8, 5, 2, 8) for layer in range(3)]
    assert hidden.shape == (5, 48)
    logits = loaded.model.logits(hidden[2:4])
    assert logits.shape == (2, VOCAB)
    assert logits.dtype == torch.float32
