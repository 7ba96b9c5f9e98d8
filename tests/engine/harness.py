"""Engines over small random models, driven by token ids; and an oracle for their keyed samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ramet import LLM
from ramet.config import EngineConfig
from ramet.engine.engine import Engine
from ramet.engine.group import GroupRequest, SampleEvent
from ramet.engine.memory import plan_memory
from ramet.models.registry import LoadedModel, load_model
from ramet.sampling.rng import gumbel_noise, row_keys, stream_keys, token_bits
from ramet.sampling_params import SamplingParams

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@lru_cache
def tiny_model(seed: int = 0) -> tuple[EngineConfig, LoadedModel]:
    folder = Path(mkdtemp(prefix="ramet-tiny-"))
    (folder / "config.json").write_text(json.dumps(TINY))
    config = EngineConfig(model=str(folder), dtype="float32", load_format="dummy", seed=seed)
    return config, load_model(config, device="cpu")


def tiny_engine(pages: int = 400, page_size: int = 4, **settings: Any) -> Engine:
    """A float32 engine over the tiny model with a pool of ``pages``."""
    base, loaded = tiny_model()
    probe = 2 * TINY["num_hidden_layers"] * TINY["num_key_value_heads"] * TINY["head_dim"] * 4 * page_size
    config = EngineConfig(
        model=base.model,
        dtype="float32",
        load_format="dummy",
        page_size=page_size,
        kv_cache_memory_bytes=pages * probe,
        **{"max_num_seqs": 32, "max_num_batched_tokens": 64, **settings},
    )
    length = loaded.max_model_len if config.max_model_len is None else config.max_model_len
    memory = plan_memory(config, loaded.spec, max_model_len=length, itemsize=4)
    return Engine(loaded.model, loaded.spec, config, memory)


def request(name: str, prompt: Iterable[int], *, seed: int = 0, max_tokens: int = 8, **params: Any) -> GroupRequest:
    sampling = SamplingParams(max_tokens=max_tokens, detokenize=False, **params)
    return GroupRequest(
        request_id=name,
        prompt_token_ids=np.array(list(prompt), np.int32),
        params=sampling,
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=tuple(sampling.stop_token_ids),
    )


Answers = dict[tuple[str, int], list[int]]


def run(
    engine: Engine,
    requests: Iterable[GroupRequest] = (),
    *,
    each_step: Callable[[int], None] | None = None,
    finals: dict[tuple[str, int], SampleEvent] | None = None,
) -> Answers:
    """Run requests to the end; returns the tokens of every sample."""
    for r in requests:
        engine.add(r)
    answers: Answers = {}
    step = 0
    while engine.has_unfinished:
        for event in engine.step():
            if isinstance(event, SampleEvent) and event.finish_reason is not None:
                answers[event.request_id, event.index] = event.log.token_ids.tolist()
                if finals is not None:
                    finals[event.request_id, event.index] = event
        if each_step is not None:
            each_step(step)
        step += 1
        assert step < 200_000
    return answers


def assert_all_free(engine: Engine) -> None:
    """After the last request nothing is held, and clearing the cache frees every page."""
    assert not engine.scheduler.has_work
    assert engine.rows.tails.num_free == engine.rows.tails.num_slots
    assert engine.forest.num_available == engine.forest.pool.num_pages
    engine.reset_prefix_cache()
    assert engine.forest.pool.num_free == engine.forest.pool.num_pages
    assert not engine.forest.runs and not engine.forest.roots


def dense_logits(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """Logits after every position by plain dense attention, with no cache (float32 [T, vocab])."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)

    hidden = loaded.model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    return loaded.model.logits(hidden)


def keyed_scores(logits: np.ndarray, temperature: float, seed: int, sample_id: int, position: int) -> np.ndarray:
    """Perturbed scores of one sampled token by the documented formula: logits / T + Gumbel noise (float64)."""
    keys = row_keys(stream_keys(seed, np.array([sample_id])), np.array([position]))
    bits = token_bits(keys, np.arange(len(logits)))
    return logits.astype(np.float64) / temperature + gumbel_noise(bits).astype(np.float64)


def near_tie(loaded: LoadedModel, r: GroupRequest, index: int, one: list[int], other: list[int]) -> bool:
    """Whether two answers part at two tokens whose keyed scores differ by less than 1e-3 ."""
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    tokens = r.prompt_token_ids.tolist() + one[:at]
    logits = dense_logits(loaded, tokens)[-1].numpy()
    temperature = r.params.temperature or 1.0
    if r.params.greedy:
        scores = logits.astype(np.float64)
    else:
        scores = keyed_scores(logits, temperature, r.seed, r.first_sample_id + index, len(tokens))
    return abs(scores[one[at]] - scores[other[at]]) < 1e-3


def greedy_oracle(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(loaded, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def tiny_llm(**settings: Any) -> LLM:
    """The whole front door over the tiny model, with a tokenizer of single characters and a chat template."""
    folder = Path(mkdtemp(prefix="ramet-tiny-llm-"))
    (folder / "config.json").write_text(json.dumps(TINY))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: TINY["vocab_size"]]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    fixed = {"kv_cache_memory_bytes": 1 << 20, "page_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return LLM(str(folder), load_format="dummy", **{"dtype": "float32", **fixed, **settings})
