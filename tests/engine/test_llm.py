"""The offline front door over the real model."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator

import pytest

from ramet import LLM, RametError, SamplingParams
from ramet.errors import Closed, InvalidArgument, ModelError, OutOfMemory

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2-135m", dtype="float32", max_model_len=2048) as made:
        yield made


def test_prompts_of_every_form_keep_their_order(llm: LLM) -> None:
    ids = llm.tokenizer.encode("One two three")
    prompts = ["One two three", ids, {"prompt_token_ids": ids}, {"prompt": "One two three"}]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert [o.prompt for o in outputs] == ["One two three", None, None, "One two three"]
    for single in prompts:
        (output,) = llm.generate(single, params, use_tqdm=False)
        assert output.prompt_token_ids == ids
    assert llm.generate([], params) == []


def test_params_per_prompt_and_defaults(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=k, n=k, ignore_eos=True) for k in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs) for o in outputs] == [1, 2, 3]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]
    assert len(llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids) <= 16
    with pytest.raises(InvalidArgument, match="2 sampling_params for 1"):
        llm.generate("a", params[:2])


def test_unseeded_calls_differ_and_tell_the_seed_that_repeats_them(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)
    one, two = llm.generate(["Once", "Once"], params, use_tqdm=False)
    assert one.outputs[0].token_ids != two.outputs[0].token_ids
    again = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True, seed=one.seed)
    assert llm.generate("Once", again, use_tqdm=False)[0].outputs[0].token_ids == one.outputs[0].token_ids


def test_chat_uses_the_template(llm: LLM) -> None:
    message = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    one, two = llm.chat([message, message], params, use_tqdm=False)
    assert one.outputs[0].text == two.outputs[0].text == "The capital of France is Paris."
    assert llm.chat(message, params, use_tqdm=False)[0].outputs[0].finish_reason == "stop"


def test_fork_grows_new_samples_from_the_cache(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=10, seed=3, ignore_eos=True)
    (request,) = llm.generate("The old house on the hill", params, use_tqdm=False)
    tokens = request.prompt_token_ids + request.outputs[1].token_ids
    position = len(request.prompt_token_ids) + 4
    forked = llm.fork(request, position, index=1)
    assert forked.prompt_token_ids == tokens[:position] and forked.num_cached_tokens >= position - 1
    continued = {tuple(s.token_ids[:6]) for s in forked.outputs}
    assert tuple(tokens[position:]) not in continued, "new sample ids draw new tokens"
    assert llm.fork(request, position, index=1).outputs[0].token_ids != forked.outputs[0].token_ids
    for bad in (0, len(tokens) + 1):
        with pytest.raises(InvalidArgument, match="position"):
            llm.fork(request, bad, index=1)
    with pytest.raises(InvalidArgument, match="index"):
        llm.fork(request, position, index=2)


def test_bad_input_is_one_clear_line_and_loses_nothing(llm: LLM) -> None:
    bad = [
        lambda: llm.generate(["fine", ""]),
        lambda: llm.generate([[1, 2], [1, 10**9]]),
        lambda: llm.generate([[1, 10**30]]),
        lambda: llm.generate([[1, -5]]),
        lambda: llm.generate([[1, "x"]]),
        lambda: llm.generate("long " * 3000),
        lambda: llm.generate({"text": "x"}),
        lambda: llm.generate(5),
        lambda: llm.generate("x", "y"),
        lambda: SamplingParams(n=0),
        lambda: SamplingParams(n=10**9),
        lambda: SamplingParams(temperature=-1),
        lambda: SamplingParams(temperature=float("nan")),
        lambda: SamplingParams(temprature=1),
        lambda: SamplingParams(top_p=0),
        lambda: SamplingParams(stop=[""]),
        lambda: SamplingParams(structured_outputs={"json": {}}),
        lambda: llm.chat([]),
        lambda: LLM("smollm2-135m", dtpe="float32"),
        lambda: LLM("smollm2-135m", dtype="int8"),
        lambda: LLM("smollm2-135m", kv_cache_memory_bytes=1),
        lambda: LLM("smollm2-135m", max_model_len=10**6),
        lambda: LLM("smollm2-135m", max_num_seqs=64, max_num_batched_tokens=32),
        lambda: LLM("smollm2-135m", tensor_parallel_size=2),
        lambda: LLM("no/such/model/anywhere"),
    ]
    for call in bad:
        with pytest.raises(RametError) as error:
            call()
        assert "\n" not in str(error.value) and len(str(error.value)) > 20
    assert not llm.engine.has_unfinished
    assert llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_errors_have_their_kind() -> None:
    with pytest.raises(OutOfMemory, match="kv_cache_memory_bytes"):
        LLM("smollm2-135m", kv_cache_memory_bytes=1)
    with pytest.raises(ModelError):
        LLM("nope")


def test_leaving_a_stream_early_frees_everything(llm: LLM) -> None:
    for _ in llm.stream("Hello", SamplingParams(n=8, max_tokens=200, ignore_eos=True)):
        break
    gc.collect()
    assert not llm.engine.has_unfinished
    assert llm.stats()["pages_in_use"] == 0


def test_ctrl_c_aborts_cleanly_and_the_llm_goes_on(llm: LLM) -> None:
    before = llm.stats()["groups_finished"]
    threading.Timer(1.0, lambda: signal.raise_signal(signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello"] * 4, SamplingParams(n=8, max_tokens=1900, ignore_eos=True), use_tqdm=False)
    stats = llm.stats()
    assert stats["pages_in_use"] == 0 and stats["samples_running"] == 0
    assert stats["groups_finished"] == before + 4
    assert llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_reset_prefix_cache_frees_what_is_unused(llm: LLM) -> None:
    llm.generate("A prompt of a few tokens, twice", SamplingParams(max_tokens=4), use_tqdm=False)
    assert llm.stats()["pages_cached"] > 0
    assert llm.reset_prefix_cache() > 0
    stats = llm.stats()
    assert stats["pages_cached"] == 0 and stats["pages_free"] == stats["pages_total"]


def test_stats_have_the_documented_keys(llm: LLM) -> None:
    from pathlib import Path

    documented = (Path(__file__).parents[2] / "docs" / "reference" / "stats.md").read_text()
    for key in llm.stats():
        assert f"`{key}`" in documented, key


def test_shared_steps_are_counted(llm: LLM) -> None:
    before = llm.stats()
    prompt = "Count the shared steps of this. " * 20
    llm.generate(prompt, SamplingParams(n=16, max_tokens=8, ignore_eos=True), use_tqdm=False)
    after = llm.stats()
    assert after["steps_shared"] - before["steps_shared"] == 7, "every decode step after the first token"
    read = after["kv_tokens_read"] - before["kv_tokens_read"]
    logical = after["kv_tokens_logical"] - before["kv_tokens_logical"]
    assert 0 < read < logical


def test_a_closed_llm_says_so() -> None:
    llm = LLM("smollm2-135m", max_model_len=256)
    llm.close()
    llm.close()
    with pytest.raises(Closed):
        llm.generate("x")
