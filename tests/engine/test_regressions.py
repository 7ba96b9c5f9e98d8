"""Mistakes that were made once, each with the smallest case that showed it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from forest_checks import check_forest
from harness import assert_all_free, request, run, tiny_engine, tiny_llm

from ramet import LLM, SamplingParams
from ramet.bench.runner import measure
from ramet.bench.workload import Workload
from ramet.engine.engine import Engine
from ramet.engine.group import GroupEvent
from ramet.errors import InvalidArgument, OutOfMemory
from ramet.sampling_params import RequestOutputKind

# ---- engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", range(9, 14))
def test_a_young_row_gives_way_to_an_older_prompt_that_is_still_being_computed(pages: int) -> None:
    """The only running row was taken for the oldest request, and the lack of a page for it for the end."""
    requests = [request("old", range(28), max_tokens=2), request("young", [1, 2, 3], max_tokens=25)]
    expected = run(tiny_engine(), requests)
    engine = tiny_engine(pages=pages, max_model_len=28, max_num_seqs=4, max_num_batched_tokens=4)
    requests[0] = request("old", range(26), max_tokens=2)
    expected |= run(tiny_engine(), requests[:1])
    run(engine, [request("before", [1, 2, 3], max_tokens=1)])  # the young one's prompt is there already
    assert run(engine, requests) == expected
    assert_all_free(engine)


def test_a_prefix_in_many_short_runs_does_not_fill_the_pool() -> None:
    """Every run begins a page, so a path through nine runs of a token takes nine pages."""
    engine = tiny_engine(pages=12, max_model_len=40, max_num_seqs=4)
    trunk = list(range(40))
    for k in range(1, 10):
        run(engine, [request(f"r{k}", [*trunk[:k], 90], max_tokens=1)])
    long = [request("long", trunk[:30], max_tokens=10)]
    assert run(engine, long) == run(tiny_engine(), long)
    assert_all_free(engine)


def test_an_aborted_answer_of_a_scored_prompt_ends_once() -> None:
    engine = tiny_engine(max_num_batched_tokens=32)
    engine.add(request("r", range(50), n=3, max_tokens=0, prompt_logprobs=1))
    engine.step()
    engine.abort("r", 1)
    events: list[Any] = []
    while engine.has_unfinished:
        events += engine.step()
    assert [(e.index, e.finish_reason) for e in events[:-1]] == [(1, "abort"), (0, "length"), (2, "length")]
    assert isinstance(events[-1], GroupEvent) and len(events[-1].prompt_logprobs.token_ids) == 49


@pytest.mark.parametrize(("length", "steps", "scored"), [(60, 1, None), (60, 2, 59), (1, 1, 0)])
def test_prompt_logprobs_are_whole_or_absent(length: int, steps: int, scored: int | None) -> None:
    """An abort in the middle of a prompt left fewer scores than tokens; a prompt of one token had none at all."""
    engine = tiny_engine(max_num_batched_tokens=32)
    engine.add(request("r", range(length), prompt_logprobs=1))
    for _ in range(steps):
        engine.step()
    engine.abort("r")
    (end,) = [event for event in engine.step() if isinstance(event, GroupEvent)]
    assert (None if end.prompt_logprobs is None else len(end.prompt_logprobs.token_ids)) == scored


def fail_sometimes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, rng = engine.runner.forward, np.random.default_rng(2)

    def failing(batch: Any) -> Any:
        result = forward(batch)
        if rng.random() < 0.3:
            raise MemoryError
        return result

    monkeypatch.setattr(engine.runner, "forward", failing)


@pytest.mark.parametrize("caching", [True, False])
def test_a_step_that_failed_is_as_if_it_had_not_begun(caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that had started in it went on without their first token, and the news of aborts were lost."""
    prompt = list(range(50))
    requests = [
        request("one", prompt, logprobs=1),
        request("many", prompt[:40], n=6, seed=4, prompt_logprobs=0),
        request("same", prompt[:40], n=2, seed=5),
        request("score", prompt[:45], max_tokens=0, prompt_logprobs=0),
        request("gone", [7, 8, 9]),
    ]
    expected = run(tiny_engine(), requests)
    engine = tiny_engine(pages=40, max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=caching)
    fail_sometimes(engine, monkeypatch)
    for r in requests:
        engine.add(r)
    engine.abort("gone")
    answers: dict[tuple[str, int], list[int]] = {}
    scores: dict[str, int] = {}
    while engine.has_unfinished:
        try:
            events = engine.step()
        except MemoryError:
            events = []
        check_forest(engine.forest)
        for event in events:
            if isinstance(event, GroupEvent):
                scores[event.request_id] = len(event.prompt_logprobs.token_ids) if event.prompt_logprobs else 0
            elif event.finish_reason is not None:
                answers[event.request_id, event.index] = event.log.token_ids.tolist()
    assert answers == expected | {("gone", 0): []}
    assert scores == {"one": 0, "many": 39, "same": 0, "score": 44, "gone": 0}
    assert_all_free(engine)


# ---- front door ----------------------------------------------------------------------------------------------------


@pytest.fixture
def llm() -> Iterator[LLM]:
    with tiny_llm() as made:
        yield made


BASE = SamplingParams(n=2, max_tokens=12, seed=3)
DELTA = replace(BASE, output_kind=RequestOutputKind.DELTA, logprobs=1)


def test_a_stream_and_a_call_in_the_middle_of_it_both_get_everything(llm: LLM) -> None:
    """Each took the other's news away: the stream missed its end, or a loop waited for ever."""
    (whole,) = llm.generate("abc", BASE, use_tqdm=False)
    texts, tokens = ["", ""], [[], []]
    for i, output in enumerate(llm.stream("abc", DELTA)):
        for k, sample in enumerate(output.outputs):
            assert len(sample.logprobs or []) == len(sample.token_ids)
            texts[k] += sample.text
            tokens[k] += sample.token_ids
        if i == 2:
            llm.generate("other", BASE, use_tqdm=False)
    assert output.finished
    assert texts == [sample.text for sample in whole.outputs]
    assert tokens == [sample.token_ids for sample in whole.outputs]


def test_loops_may_interleave(llm: LLM) -> None:
    (whole,) = llm.generate("abc", BASE, use_tqdm=False)
    *_, (one, other) = zip(llm.stream("abc", BASE), llm.stream("abc", BASE), strict=False)
    assert one.outputs == other.outputs == whole.outputs
    first = llm.as_completed(["abc", "abcd", "abcde"], BASE)
    got = [next(first)]
    second = list(llm.as_completed(["x", "y"], BASE))
    got += first
    assert sorted(i for i, _ in got) == [0, 1, 2] and sorted(i for i, _ in second) == [0, 1]
    assert not llm.engine.has_unfinished and not llm.engine.groups


def test_leaving_one_loop_takes_nothing_from_another(llm: LLM) -> None:
    whole = llm.generate("abc", BASE, use_tqdm=False)[0].outputs[0].text
    stream, text = llm.stream("abc", DELTA), ""
    text += next(stream).outputs[0].text
    for _ in llm.stream("xyz", BASE):
        break
    for _ in llm.as_completed(["x", "y"], [BASE, replace(BASE, max_tokens=400)]):
        break
    text += "".join(output.outputs[0].text for output in stream)
    assert text == whole
    assert not llm.engine.has_unfinished and llm.stats()["pages_in_use"] == 0


def test_generate_gives_whole_answers_also_of_kind_delta(llm: LLM) -> None:
    """Samples that ended before the last one came back empty."""
    stops = [llm.tokenizer.encode(c)[0] for c in "abcdefghij"]
    params = replace(BASE, n=8, max_tokens=40, stop_token_ids=stops)
    (whole,) = llm.generate("abc", params, use_tqdm=False)
    (delta,) = llm.generate("abc", replace(params, output_kind=RequestOutputKind.DELTA), use_tqdm=False)
    assert len({len(sample.token_ids) for sample in whole.outputs}) > 1
    assert delta.outputs == whole.outputs


def test_closing_ends_open_streams(llm: LLM) -> None:
    stream = llm.stream("abc", BASE)
    next(stream)
    llm.close()
    (last,) = stream
    assert [sample.finish_reason for sample in last.outputs] == ["abort", "abort"]


def test_an_error_in_a_step_reaches_the_caller_and_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream("abc", BASE)
    next(stream)

    def full(plan: Any) -> Any:
        raise OutOfMemory("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "load", full)
        with pytest.raises(OutOfMemory):
            llm.generate(["x", "y"], BASE, use_tqdm=False)
    assert list(llm.engine.groups) == ["request-0"]
    assert [len(sample.token_ids) for sample in list(stream)[-1].outputs] == [12, 12]
    assert llm.stats()["pages_in_use"] == 0


def test_forks_of_forks_draw_samples_of_their_own(llm: LLM) -> None:
    """A fork and a fork of its fork took the same sample ids, so they wrote the same tokens."""
    (root,) = llm.generate("abc", BASE, use_tqdm=False)
    position = len(root.prompt_token_ids) + 2
    child = llm.fork(root, position)
    answers = [child, llm.fork(child, position), llm.fork(root, position), llm.fork(child, position)]
    assert len({tuple(sample.token_ids) for answer in answers for sample in answer.outputs}) == 8


def test_prompts_of_numpy_integers_and_what_looks_like_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    ids = llm.tokenizer.encode("abc")
    forms: list[Any] = [ids, list(np.array(ids)), np.array(ids), [list(np.array(ids))], np.array([ids], np.uint8)]
    answers = [llm.generate(form, params, use_tqdm=False) for form in forms]
    assert len({tuple(answer.outputs[0].token_ids) for (answer,) in answers}) == 1
    assert all(type(token) is int for (answer,) in answers for token in answer.prompt_token_ids)
    for bad in (b"abc", [b"abc"], {"prompt_token_ids": None}, {"prompt": None}, {1: 2, "x": 3}, [[True, False]]):
        with pytest.raises(InvalidArgument, match="prompt"):
            llm.generate(bad, params, use_tqdm=False)  # type: ignore[arg-type]


def test_a_fork_of_an_answer_that_holds_only_news_is_refused(llm: LLM) -> None:
    """It forked from the last token alone, as if that were the whole sample."""
    *_, delta = llm.stream("abc", DELTA)
    *_, whole = llm.stream("abc", BASE)
    position = len(whole.prompt_token_ids) + 2
    with pytest.raises(InvalidArgument, match="output_kind=DELTA.*output_kind=CUMULATIVE"):
        llm.fork(delta, position)
    (made,) = llm.generate("abc", DELTA, use_tqdm=False)  # whole answers, of whatever kind
    forked = llm.fork(made, position)
    assert [s.text for s in forked.outputs] == [s.text for s in llm.fork(whole, position).outputs]
    assert forked.prompt_token_ids == whole.prompt_token_ids + whole.outputs[0].token_ids[:2]


@pytest.mark.parametrize("kind", [int, np.int64])
def test_a_fork_takes_any_integer_and_nothing_else(llm: LLM, kind: type) -> None:
    (root,) = llm.generate("abc", BASE, use_tqdm=False)
    assert llm.fork(root, kind(2), index=kind(1)).finished
    for position, index in ((2.0, 0), ("2", 0), (True, 0), (2, 1.0), (2, None)):
        with pytest.raises(InvalidArgument, match="allowed"):
            llm.fork(root, position, index=index)  # type: ignore[arg-type]


def test_ids_that_callers_choose_never_meet_those_that_are_given(llm: LLM) -> None:
    """The ids given were the numbers 0, 1, ...: a caller's "3" made the fourth request fail."""
    client = llm.client
    names = [str(i) for i in range(8)]
    for name in names:
        client.submit(*client.request("abc", BASE, request_id=name))
    (given,) = llm.generate("abc", BASE, use_tqdm=False)
    assert given.request_id not in names
    for bad in ("", given.request_id, "request-99"):
        with pytest.raises(InvalidArgument, match="request_id"):
            client.request("abc", BASE, request_id=bad)
    client.discard(names)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("streams", [False, True])
def test_one_aborted_copy_of_a_greedy_answer_keeps_the_text_that_was_held_back(llm: LLM, streams: bool) -> None:
    """The end of its text could have become a stop string; it was lost although it was decoded."""
    greedy = SamplingParams(n=3, temperature=0.0, max_tokens=12)
    text = llm.generate("abc", greedy, use_tqdm=False)[0].outputs[0].text
    client = llm.client
    held = replace(greedy, stop=text[:5] + "\0")  # begins like the text and never comes
    request, output = client.request("abc", held, stream=streams)
    client.submit(request, output)
    for _ in range(4):
        client.step()
    client.abort(request.request_id, 1)
    while not output.finished:
        client.step()
    assert [sample.finish_reason for sample in output.outputs] == ["length", "abort", "length"]
    assert [sample.text for sample in output.outputs] == [text, text[: len(output.outputs[1].token_ids)], text]
    assert output.outputs[1].text
    assert llm.stats()["samples_finished"] == {"stop": 0, "length": 5, "abort": 1}


def test_a_benchmark_beside_an_open_stream_takes_nothing_from_it(llm: LLM) -> None:
    """It had a client of its own, with the same request ids, which got the events of the other's requests."""
    (whole,) = llm.generate("abc", BASE, use_tqdm=False)
    stream = llm.stream("abc", BASE)
    next(stream)
    measured = measure(llm, Workload(num_prompts=2, n=3, input_len=9, output_len=5))
    assert measured.generated_tokens == 30
    assert [len(times.samples) for times in measured.groups] == [3, 3]
    *_, last = stream
    assert last.outputs == whole.outputs
    assert not llm.engine.has_unfinished and llm.stats()["pages_in_use"] == 0


def test_an_error_in_a_benchmark_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(plan: Any) -> Any:
        raise OutOfMemory("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "load", full)
        with pytest.raises(OutOfMemory):
            measure(llm, Workload(num_prompts=2, n=3, input_len=9, output_len=5))
    assert not llm.engine.has_unfinished and llm.stats()["pages_in_use"] == 0
