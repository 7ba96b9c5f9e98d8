"""How samples end: stops, limits, aborts, log-probabilities that fit their tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import assert_all_free, dense_logits, request, run, tiny_engine, tiny_model
from real_model import RealModel, generate

from ramet.engine.group import SampleEvent
from ramet.errors import InvalidArgument
from ramet.sampling_params import RequestOutputKind, SamplingParams

PROMPT = list(range(10, 30))


def test_max_tokens_zero_and_one() -> None:
    engine = tiny_engine()
    finals: dict = {}
    got = run(engine, [request("zero", PROMPT, max_tokens=0), request("one", PROMPT, max_tokens=1)], finals=finals)
    assert got["zero", 0] == [] and len(got["one", 0]) == 1
    assert finals["zero", 0].finish_reason == finals["one", 0].finish_reason == "length"


def test_stop_ids_end_a_sample_and_min_tokens_holds_them_off() -> None:
    free = run(tiny_engine(), [request("g", PROMPT, seed=1, max_tokens=30)])["g", 0]
    stop = free[4]
    finals: dict = {}
    first = free.index(stop)
    got = run(tiny_engine(), [request("g", PROMPT, seed=1, max_tokens=30, stop_token_ids=[stop])], finals=finals)
    assert got["g", 0] == free[: first + 1]
    assert finals["g", 0].finish_reason == "stop" and finals["g", 0].stop_reason == stop
    held = run(tiny_engine(), [request("g", PROMPT, seed=1, max_tokens=30, min_tokens=8, stop_token_ids=[stop])])
    assert stop not in held["g", 0][:8] and len(held["g", 0]) >= 8


def test_logprobs_belong_to_their_tokens_also_after_preemption() -> None:
    _, loaded = tiny_model()
    finals: dict = {}
    engine = tiny_engine(pages=22, max_num_seqs=16)
    requests = [request("g", PROMPT, n=12, seed=2, max_tokens=20, logprobs=2)]
    run(engine, requests, finals=finals)
    assert engine.stats.preemptions > 0
    for k in range(12):
        log = finals["g", k].log
        tokens = log.token_ids.tolist()
        expected = dense_logits(loaded, PROMPT + tokens).double().log_softmax(-1).numpy()[len(PROMPT) - 1 : -1]
        assert len(log.logprobs) == len(tokens) == 20 == len(log.top_ids)
        np.testing.assert_allclose(log.logprobs, expected[np.arange(20), tokens], atol=2e-5)
        np.testing.assert_allclose(log.top_logprobs, -np.sort(-expected, axis=1)[:, :2], atol=2e-5)
        ranks = 1 + (expected > expected[np.arange(20), tokens][:, None]).sum(axis=1)
        assert (np.abs(log.ranks - ranks) <= 1).all()


def test_a_sample_that_has_nothing_to_draw_is_aborted_alone() -> None:
    """allowed_token_ids and a logit bias cannot empty a row, but min_tokens on the only allowed id can."""
    engine = tiny_engine()
    finals: dict = {}
    stuck = request("stuck", PROMPT, allowed_token_ids=[5], stop_token_ids=[5], min_tokens=3, logprobs=0)
    got = run(engine, [stuck, request("fine", PROMPT, seed=3, logprobs=0)], finals=finals)
    assert finals["stuck", 0].finish_reason == "abort" and got["stuck", 0] == []
    assert len(got["fine", 0]) == 8 and np.isfinite(finals["fine", 0].log.logprobs).all()
    assert_all_free(engine)


def test_aborting_one_sample_leaves_its_siblings() -> None:
    expected = run(tiny_engine(), [request("g", PROMPT, n=4, seed=7, max_tokens=12)])
    engine = tiny_engine()

    def abort(step: int) -> None:
        if step == 3:
            engine.abort("g", 2)

    finals: dict = {}
    got = run(engine, [request("g", PROMPT, n=4, seed=7, max_tokens=12)], each_step=abort, finals=finals)
    assert finals["g", 2].finish_reason == "abort" and got["g", 2] == expected["g", 2][:4]
    assert all(got["g", k] == expected["g", k] for k in (0, 1, 3))
    assert_all_free(engine)


def test_aborting_one_copy_of_a_greedy_group_leaves_the_others() -> None:
    engine = tiny_engine()
    finals: dict = {}
    abort = lambda step: engine.abort("g", 1) if step == 2 else None
    got = run(engine, [request("g", PROMPT, n=3, temperature=0.0)], each_step=abort, finals=finals)
    assert [finals["g", k].finish_reason for k in range(3)] == ["length", "abort", "length"]
    assert len(got["g", 1]) < len(got["g", 0])


def test_streaming_rows_send_every_step_and_others_only_the_end() -> None:
    from ramet.engine.group import GroupRequest

    engine = tiny_engine()
    quiet, loud = request("quiet", PROMPT), request("loud", PROMPT)
    engine.add(quiet)
    engine.add(GroupRequest(**{**loud.__dict__, "streams": True}))
    events: list[SampleEvent] = []
    while engine.has_unfinished:
        events += [e for e in engine.step() if isinstance(e, SampleEvent)]
    assert sum(e.request_id == "quiet" for e in events) == 1
    assert [len(e.log.token_ids) for e in events if e.request_id == "loud"] == list(range(1, 9))


def test_bad_requests_are_refused_and_the_engine_goes_on() -> None:
    engine = tiny_engine()
    bad = [
        request("empty", []),
        request("low", [-1]),
        request("high", [96]),
        request("long", [1] * 600),
        request("long out", PROMPT, max_tokens=500),
        request("stop", PROMPT, stop_token_ids=[96]),
        request("bias", PROMPT, logit_bias={96: 1.0}),
        request("allowed", PROMPT, allowed_token_ids=[1, 2000]),
    ]
    for r in bad:
        with pytest.raises(InvalidArgument, match="allowed"):
            engine.add(r)
    engine.add(request("a", PROMPT))
    with pytest.raises(InvalidArgument, match="in use"):
        engine.add(request("a", PROMPT))
    assert len(run(engine)["a", 0]) == 8
    assert_all_free(engine)


@pytest.mark.model
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_the_text_exactly(smollm: RealModel, include: bool) -> None:
    base = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = "The capital of France is"
    (free,) = generate(smollm.client(), [prompt], base)
    text = free.outputs[0].text
    for begin in range(0, min(len(text) - 6, 60), 7):
        stop = text[begin : begin + 5]
        at = text.index(stop)
        params = SamplingParams(
            temperature=0.0, max_tokens=40, ignore_eos=True, stop=[stop], include_stop_str_in_output=include
        )
        (output,) = generate(smollm.client(), [prompt], params)
        sample = output.outputs[0]
        assert sample.text == text[: at + (5 if include else 0)]
        assert sample.finish_reason == "stop" and sample.stop_reason == stop
        assert sample.token_ids == free.outputs[0].token_ids[: len(sample.token_ids)]
        decode = smollm.tokenizer.decode
        assert stop in decode(sample.token_ids, skip_special_tokens=True)
        assert stop not in decode(sample.token_ids[:-1], skip_special_tokens=True)


@pytest.mark.model
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_streamed_text_equals_the_final_text(smollm: RealModel, kind: RequestOutputKind) -> None:
    params: dict[str, Any] = {"n": 3, "temperature": 1.5, "max_tokens": 24, "seed": 5, "ignore_eos": True}
    (whole,) = generate(smollm.client(), ["Les élèves 😀 étaient"], SamplingParams(**params))
    client = smollm.client()
    request_, output = client.request("Les élèves 😀 étaient", SamplingParams(**params, output_kind=kind), stream=True)
    client.submit(request_, output)
    texts, tokens = ["", "", ""], [[], [], []]
    while not output.finished:
        for changed in client.step():
            for k, sample in enumerate(changed.outputs):
                if kind is RequestOutputKind.DELTA:
                    texts[k] += sample.text
                    tokens[k] += sample.token_ids
                else:
                    assert sample.text.startswith(texts[k])
                    texts[k], tokens[k] = sample.text, list(sample.token_ids)
    assert texts == [s.text for s in whole.outputs]
    assert tokens == [s.token_ids for s in whole.outputs]
