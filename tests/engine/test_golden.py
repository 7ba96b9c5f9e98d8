"""Greedy float32 tokens of the real model equal transformers', however they are computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from real_model import RealModel, generate

from ramet.sampling_params import SamplingParams

pytestmark = pytest.mark.model
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
Golden = list[dict[str, Any]]


def prompts_of(golden: Golden) -> list[list[int]]:
    return [item["prompt_token_ids"] for item in golden]


def expect(golden: Golden, outputs: list[Any]) -> None:
    for item, output in zip(golden, outputs, strict=True):
        for sample in output.outputs:
            assert sample.token_ids == item["greedy_token_ids"], item["prompt"]


def test_each_golden_prompt_alone(smollm: RealModel, golden: Golden) -> None:
    client = smollm.client()
    for item in golden:
        (output,) = generate(client, [item["prompt_token_ids"]], GREEDY)
        expect([item], [output])
        assert output.outputs[0].finish_reason == "length"


def test_text_prompts_and_eos(smollm: RealModel, golden: Golden) -> None:
    client = smollm.client()
    params = SamplingParams(temperature=0.0, max_tokens=32)
    for item in golden:
        if "prompt_text" not in item:
            continue
        (output,) = generate(client, [item["prompt_text"]], params)
        assert output.prompt_token_ids == item["prompt_token_ids"]
        assert output.outputs[0].token_ids == item["generate_token_ids_stop_at_eos"]
        if item["eos_position"] is not None and item["eos_position"] < 32:
            assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason is None


def test_mixed_batch_with_sampled_neighbours(smollm: RealModel, golden: Golden) -> None:
    client = smollm.client()
    prompts = prompts_of(golden)
    noisy = SamplingParams(n=3, temperature=1.2, max_tokens=20, seed=3)
    outputs = generate(client, prompts + prompts, [GREEDY] * len(prompts) + [noisy] * len(prompts))
    expect(golden, outputs[: len(prompts)])
    stats = client.engine.stats
    assert stats.shared_nodes + stats.nodes_declined > 0, "groups of three share their prompt"


def test_64_requests_with_equal_ids_prefill_once_and_all_match(smollm: RealModel, golden: Golden) -> None:
    client = smollm.client()
    item = golden[0]
    outputs = generate(client, [item["prompt_token_ids"]] * 64, GREEDY)
    expect([item] * 64, outputs)
    stats = client.engine.stats
    assert stats.prefill_tokens == len(item["prompt_token_ids"]) and stats.prefills == 1
    assert stats.steps == 32, "all join one step after the prefill"
    assert stats.steps_shared >= 31
    assert [o.num_cached_tokens for o in outputs] == [0] + [len(item["prompt_token_ids"])] * 63


def test_forks_in_mid_way_continue_the_golden_text(smollm: RealModel, golden: Golden) -> None:
    client = smollm.client()
    item = golden[1]
    whole = item["prompt_token_ids"] + item["greedy_token_ids"]
    start = len(item["prompt_token_ids"])
    generate(client, [item["prompt_token_ids"]], GREEDY)
    for position in (start + 1, start + 7, start + 16, start + 30):
        before = client.engine.stats.prefill_tokens
        params = SamplingParams(temperature=0.0, n=2, max_tokens=start + 32 - position, ignore_eos=True)
        (output,) = generate(client, [whole[:position]], params)
        assert output.outputs[1].token_ids == whole[position:]
        assert client.engine.stats.prefill_tokens - before == 1, "only the last token, for its logits"


def test_preempted_groups_give_the_golden_tokens(smollm: RealModel, golden: Golden) -> None:
    client = smollm.client(pages=28, page_size=4, max_model_len=96, max_num_seqs=16, max_num_batched_tokens=64)
    order = [item for item in golden if len(item["prompt_token_ids"]) < 60] * 3
    outputs = generate(client, prompts_of(order), GREEDY)
    expect(order, outputs)
    assert client.engine.stats.preemptions > 0
    engine = client.engine
    assert engine.forest.num_available == engine.forest.pool.num_pages


def test_prefix_reuse_at_every_offset(smollm: RealModel, golden: Golden) -> None:
    client = smollm.client()
    item = golden[0]
    ids = item["prompt_token_ids"]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for offset in range(1, len(ids) + 1):
        client.engine.reset_prefix_cache()
        other = [*ids[:offset], 1000 + offset, 7, 8]
        generate(client, [other], SamplingParams(max_tokens=1))
        (output,) = generate(client, [ids], params)
        assert output.num_cached_tokens == min(offset, len(ids) - 1)
        assert output.outputs[0].token_ids == item["greedy_token_ids"][:6], f"offset {offset}"


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 33])
def test_chunked_prefill_of_any_size(smollm: RealModel, golden: Golden, chunk: int) -> None:
    client = smollm.client(max_num_batched_tokens=chunk, max_num_seqs=1)
    item = min(golden, key=lambda i: len(i["prompt_token_ids"]))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,) = generate(client, [item["prompt_token_ids"]], params)
    assert output.outputs[0].token_ids == item["greedy_token_ids"][:8]
    assert client.engine.stats.steps >= len(item["prompt_token_ids"]) // chunk


def test_prompt_logprobs_are_transformers_and_the_same_on_a_warm_cache(smollm: RealModel, golden: Golden) -> None:
    from harness import dense_logits

    client = smollm.client()
    ids = golden[0]["prompt_token_ids"]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    cold, warm = generate(client, [ids], params)[0], generate(client, [ids], params)[0]
    assert cold.prompt_logprobs is not None and warm.prompt_logprobs is not None
    np.testing.assert_array_equal(cold.prompt_logprobs.values, warm.prompt_logprobs.values)
    reference = dense_logits(smollm.loaded, ids).double().log_softmax(-1)
    expected = reference[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    np.testing.assert_allclose(cold.prompt_logprobs.values[1:], expected, atol=2e-4)
    assert cold.prompt_logprobs[0] is None and len(cold.prompt_logprobs) == len(ids)


def test_twenty_turns_of_a_chat_stay_one_run(smollm: RealModel) -> None:
    client = smollm.client()
    ids = smollm.tokenizer.encode("Tell me about the sea.")
    for turn in range(20):
        (output,) = generate(client, [ids], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        assert output.num_cached_tokens >= len(ids) - 8 if turn else True
        ids = ids + output.outputs[0].token_ids + [28, 339, 100 + turn]
    assert len(client.engine.forest.runs) == 1
