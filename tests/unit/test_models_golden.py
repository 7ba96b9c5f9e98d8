"""The demo model's greedy tokens equal those of transformers and four other engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_oracle import PlainAttention

from ramet.config import EngineConfig
from ramet.models.registry import LoadedModel, load_model

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "smollm2_135m_greedy_fp32.json").read_text())

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(EngineConfig(model="smollm2-135m", dtype="float32"))


@pytest.mark.parametrize("item", GOLDEN["items"], ids=lambda item: item["prompt"][:24])
def test_greedy_tokens_equal_the_golden_ones(loaded: LoadedModel, item: dict[str, Any]) -> None:
    attend, new, position, tokens = PlainAttention(loaded.spec), item["prompt_token_ids"], 0, []
    for _ in item["greedy_token_ids"]:
        positions = torch.arange(position, position + len(new))
        hidden = loaded.model.forward(torch.tensor(new), positions, attend)
        position += len(new)
        new = [int(loaded.model.logits(hidden[-1:]).argmax())]
        tokens += new
    assert tokens == item["greedy_token_ids"]


def test_the_specification_is_the_models(loaded: LoadedModel) -> None:
    spec = loaded.spec
    assert (spec.architecture, spec.num_layers, spec.hidden_size) == ("LlamaForCausalLM", 30, 576)
    assert (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.vocab_size, spec.tie_word_embeddings, spec.rope.theta) == (49152, True, 100000.0)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((2,), 1)
    assert loaded.max_model_len == spec.max_position_embeddings == 8192
    assert set(loaded.timings) == {"find", "convert", "load"}
