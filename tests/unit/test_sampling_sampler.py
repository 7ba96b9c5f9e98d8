"""The sampler against a plain float64 oracle, and its promise that a row depends on nothing but itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import Request, answer, edited
from scipy import stats

from ramet.errors import InvalidArgument, Unsupported
from ramet.sampling.sampler import NothingToSample, SampleBatch, SampledTokens, Sampler
from ramet.sampling.state import SamplingState
from ramet.sampling_params import SamplingParams

VOCAB = 97


def admit(state: SamplingState, slot: int, r: Request) -> None:
    """Admit one row of its own."""
    state.admit(
        np.array([slot]), r.params, r.seed, np.array([r.sample]), np.array(r.prompt), np.array([r.output], dtype=int),
        list(r.eos), [list(word) for word in r.bad_words],
    )  # fmt: skip


def batch_of(requests: list[Request], slots: list[int] | None = None, index: list[int] | None = None) -> SampleBatch:
    """One row per request."""
    rows = len(requests)
    masked = [i for i, r in enumerate(requests) if r.grammar is not None]
    return SampleBatch(
        slots=np.arange(rows) if slots is None else np.array(slots),
        logit_index=np.arange(rows) if index is None else np.array(index),
        positions=np.array([r.position for r in requests]),
        num_output_tokens=np.array([len(r.output) for r in requests], dtype=np.int32),
        token_mask=np.stack([requests[i].grammar for i in masked]) if masked else None,  # type: ignore[misc]
        masked_rows=np.array(masked) if masked else None,
    )


def sampler_for(requests: list[Request], vocab_size: int, mode: Any = "processed_logprobs") -> Sampler:
    """A sampler whose slot i is request i."""
    state = SamplingState(len(requests), vocab_size)
    for slot, r in enumerate(requests):
        admit(state, slot, r)
    return Sampler(state, logprobs_mode=mode)


tokens = st.integers(0, VOCAB - 1)
parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 0.8, 1.0, 1.7, 50.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 7, 40, 96, 97, 1000]),
        "top_p": st.sampled_from([1.0, 0.999999, 0.95, 0.6, 0.1, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.0, 1e-4, 0.05, 0.5, 1.0]),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "stop_token_ids": st.lists(tokens, max_size=2),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4, -1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.5]),
        "logit_bias": st.none() | st.dictionaries(tokens, st.floats(-100, 100, width=16), max_size=4),
        "allowed_token_ids": st.none() | st.none() | st.lists(tokens, min_size=8, max_size=40),
        "logprobs": st.sampled_from([None, 0, 5]),
    }
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A row with anything it may ask for."""
    output = draw(st.lists(st.integers(0, 5), max_size=6))
    grammar = None
    if draw(st.integers(0, 4)) == 0:
        grammar = np.random.default_rng(draw(st.integers(0, 99))).random(VOCAB) < 0.7
        grammar[:60:7] = True
    return Request(
        SamplingParams(max_tokens=100, **draw(parameters)),
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        sample=draw(st.integers(0, 3)),
        prompt=draw(st.lists(tokens, max_size=12)),
        output=output,
        eos=draw(st.sampled_from([(), (2,), (2, 3)])),
        bad_words=draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=3)),
        grammar=grammar,
    )


@st.composite
def logits_rows(draw: st.DrawFn, rows: int) -> np.ndarray:
    """Logits: smooth, with ties, peaked, or partly -inf."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    kind = draw(st.sampled_from(["smooth", "ties", "peaked", "holes", "flat"]))
    z = rng.normal(0, 3, (rows, VOCAB)).astype(np.float32)
    if kind == "ties":
        z = np.round(z / 2) * 2
    elif kind == "peaked":
        z[:, rng.integers(VOCAB)] += 25
    elif kind == "holes":
        z[:, 1::3] = -np.inf
    elif kind == "flat":
        z[:] = 0.25
    return z.astype(np.float32)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_row_is_what_the_oracle_draws(data: st.DataObject) -> None:
    rows = data.draw(st.lists(requests(), min_size=1, max_size=6))
    logits = data.draw(logits_rows(len(rows)))
    possible = [i for i, r in enumerate(rows) if np.isfinite(edited(logits[i], r)).any()]
    rows, logits = [rows[i] for i in possible], logits[possible]
    got = sampler_for(rows, VOCAB).sample(torch.from_numpy(logits), batch_of(rows))
    for i, r in enumerate(rows):
        want = answer(logits[i], r)
        token = int(got.token_ids[i])
        if want.fragile:
            continue
        near = 1e-3 if not 0 < r.params.temperature < 0.01 else 0.2  # float32 logits / 1e-6 are rounded to about 0.1
        assert want.scores[token] >= want.scores.max() - near
        if r.params.greedy:
            assert want.scores[token] >= want.scores.max() - 1e-5
        if r.params.logprobs is not None and near == 1e-3:
            assert got.logprobs is not None
            assert got.logprobs[i] == pytest.approx(want.processed[token], abs=2e-5, rel=1e-5)


def mixed_requests(vocab_size: int, count: int, seed: int = 0) -> list[Request]:
    """Rows of all tiers, with and without edits and log-probabilities."""
    rng = np.random.default_rng(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "logprobs": 3},
        {"top_k": 20, "logprobs": 0},
        {"top_p": 0.9, "temperature": 1.2},
        {"top_k": 300, "top_p": 0.97, "min_p": 0.01, "logprobs": 7},
        {"min_p": 0.1},
        {"top_p": 0.9999, "temperature": 3.0, "logprobs": 1},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 2},
        {"logit_bias": {3: 50.0, 9: -50.0}, "top_k": 5},
        {"allowed_token_ids": list(range(0, vocab_size, 3)), "temperature": 0.9},
        {"min_tokens": 9, "stop_token_ids": list(range(20)), "logprobs": 0},
    ]
    result = []
    for i in range(count):
        params = SamplingParams(max_tokens=100, **kinds[i % len(kinds)])
        prompt = rng.integers(0, vocab_size, 20).tolist()
        output = rng.integers(0, vocab_size, 7).tolist()
        words = [[4], [output[-1], 5]] if i % 5 == 0 else []
        grammar = rng.random(vocab_size) < 0.9 if i % 7 == 3 else None
        result.append(Request(params, i * 77, i % 3, prompt, output, (2,), words, grammar))
    return result


def same_row(a: SampledTokens, i: int, b: SampledTokens, j: int, asked: int | None) -> bool:
    """Whether row i of a and row j of b are equal to the bit."""
    if a.token_ids[i] != b.token_ids[j]:
        return False
    if asked is None:
        return True
    assert a.logprobs is not None and b.logprobs is not None
    equal = a.logprobs[i].tobytes() == b.logprobs[j].tobytes()
    if asked:
        assert a.top is not None and b.top is not None and a.ranks is not None and b.ranks is not None
        p, q = np.searchsorted(a.top.rows, i), np.searchsorted(b.top.rows, j)
        equal &= a.ranks[i] == b.ranks[j]
        equal &= np.array_equal(a.top.token_ids[p, :asked], b.top.token_ids[q, :asked])
        equal &= a.top.logprobs[p, :asked].tobytes() == b.top.logprobs[q, :asked].tobytes()
    return bool(equal)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("vocab_size", [500, 5003])
def test_a_row_is_the_same_to_the_bit_alone_and_in_any_batch(vocab_size: int, mode: str) -> None:
    rows = mixed_requests(vocab_size, 41)
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (41, vocab_size)).astype(np.float32))
    sampler = sampler_for(rows, vocab_size, mode)
    whole = sampler.sample(logits, batch_of(rows))
    rng = np.random.default_rng(2)
    subsets = [[i] for i in range(41)] + [rng.permutation(41)[: rng.integers(2, 41)].tolist() for _ in range(12)]
    threads, block = torch.get_num_threads(), sampler._hasher.max_rows
    for number, subset in enumerate(subsets):
        torch.set_num_threads((1, 4)[number % 2])  # one core hashes, or all do
        sampler._hasher.max_rows = (block, 3)[number % 2]
        chosen = [rows[i] for i in subset]
        part = sampler.sample(logits[subset], batch_of(chosen, slots=subset))
        for j, i in enumerate(subset):
            assert same_row(whole, i, part, j, rows[i].params.logprobs)
    torch.set_num_threads(threads)


def test_a_row_is_the_same_when_neighbours_repeat_it_and_share_its_logits() -> None:
    rows = mixed_requests(500, 26)
    sampler = sampler_for(rows, 500)
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (1, 500)).astype(np.float32))
    shared = sampler.sample(logits, batch_of(rows, index=[0] * 26))
    apart = sampler.sample(logits.repeat(26, 1), batch_of(rows))
    twice = sampler.sample(logits, batch_of(rows + rows, slots=[*range(26), *range(26)], index=[0] * 52))
    for i, r in enumerate(rows):
        assert same_row(shared, i, apart, i, r.params.logprobs)
        for j in (i, 26 + i):
            assert same_row(shared, i, twice, j, r.params.logprobs)


def test_an_empty_batch_gives_no_tokens() -> None:
    assert sampler_for(mixed_requests(500, 2), 500).sample(torch.zeros(3, 500), batch_of([])).token_ids.shape == (0,)


def test_logits_are_left_as_they_were() -> None:
    rows = mixed_requests(500, 26)
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (26, 500)).astype(np.float32))
    before = logits.clone()
    sampler_for(rows, 500).sample(logits, batch_of(rows))
    assert torch.equal(logits, before)


def test_seeded_rows_repeat_and_unseeded_rows_do_not() -> None:
    def batch(fresh: list[int]) -> np.ndarray:
        state = SamplingState(8, 1000)
        plain = SamplingParams()
        for slot, seed in ((0, 7), (1, fresh[0]), (2, 7), (3, fresh[1])):
            state.admit(np.array([slot]), plain, seed, np.array([slot // 2]), np.arange(5))
        logits = torch.zeros(1, 1000)
        draws = []
        for position in range(5, 25):
            rows = SampleBatch(np.arange(4), np.zeros(4, int), np.full(4, position), np.full(4, position - 5))
            draws.append(Sampler(state).sample(logits, rows).token_ids)
        return np.array(draws)

    one, two = batch([101, 102]), batch([103, 104])
    assert np.array_equal(one[:, [0, 2]], two[:, [0, 2]])
    assert (one[:, [1, 3]] != two[:, [1, 3]]).mean() > 0.9
    assert (one[:, 0] != one[:, 2]).mean() > 0.9  # two samples of one seed are two samples


def test_a_reused_slot_gives_what_a_fresh_one_gives() -> None:
    rows = mixed_requests(500, 26)
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (26, 500)).astype(np.float32))
    fresh = sampler_for(rows, 500).sample(logits, batch_of(rows))
    used = sampler_for(rows[::-1], 500)
    used.state.record(np.arange(26), np.arange(26))
    used.state.release(np.arange(26))
    for slot, r in enumerate(rows):
        admit(used.state, slot, r)
    again = used.sample(logits, batch_of(rows))
    for i, r in enumerate(rows):
        assert same_row(fresh, i, again, i, r.params.logprobs)


def test_the_greedy_row_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(1, 300)
    logits[0, [40, 41, 299]] = 5.0
    for seed in range(20):
        r = Request(SamplingParams(temperature=0.0, top_k=2), seed=seed)
        assert sampler_for([r], 300).sample(logits, batch_of([r])).token_ids.tolist() == [40]


def test_tiers_are_counted_by_what_each_row_needs() -> None:
    rows = mixed_requests(500, 13)
    sampler = sampler_for(rows, 500)
    logits = torch.zeros(13, 500)
    sampler.sample(logits, batch_of(rows))
    full = {i for i in range(13) if i >= 8 or rows[i].bad_words or rows[i].grammar is not None}
    assert sampler.counters == {"steps": 1, "greedy": 0, "plain": 2, "filtered": 3, "full": len(full)}
    old_enough = batch_of([rows[12]], slots=[12])
    old_enough.num_output_tokens[:] = 9  # min_tokens is reached: nothing left to edit
    sampler.sample(logits[:1], old_enough)
    assert sampler.counters["plain"] == 3 and sampler.counters["full"] == len(full)


DISTRIBUTIONS = {
    "uniform": np.full(64, 1 / 64),
    "peaked": np.array([0.97] + [0.03 / 63] * 63),
    "geometric": np.array([0.5**i for i in range(1, 12)] + [0.5**11]),
    "zipf": 1 / np.arange(1, 401) / np.sum(1 / np.arange(1, 401)),
    "two": np.array([0.3, 0.7]),
}
DRAWS = 100_000


@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
@pytest.mark.parametrize("along", ["positions", "samples"])
def test_frequencies_are_the_probabilities(name: str, along: str) -> None:
    p = DISTRIBUTIONS[name]
    logits = torch.from_numpy(np.log(p).astype(np.float32) * 0.5)[None]  # undone by the temperature
    zeros = np.zeros(DRAWS, dtype=np.int64)
    samples = DRAWS if along == "samples" else 1
    state = SamplingState(samples, len(p))
    slots = np.arange(samples)
    for part in np.array_split(slots, max(1, samples // 10_000)):
        state.admit(part, SamplingParams(n=len(part), temperature=0.5), 5, part, np.arange(3))
    batch = SampleBatch(slots if samples > 1 else zeros, zeros, zeros + 3 if samples > 1 else np.arange(DRAWS), zeros)
    counts = np.bincount(Sampler(state).sample(logits, batch).token_ids, minlength=len(p))
    assert stats.chisquare(counts, p * DRAWS).pvalue > 1e-3


def test_filtered_frequencies_are_the_renormalised_probabilities() -> None:
    p = DISTRIBUTIONS["zipf"]
    logits = torch.from_numpy(np.log(p).astype(np.float32))[None]
    state = SamplingState(1, len(p))
    state.admit(np.array([0]), SamplingParams(top_k=10, top_p=0.9), 5, np.array([0]), np.arange(3))
    zeros = np.zeros(DRAWS, dtype=np.int64)
    drawn = Sampler(state).sample(logits, SampleBatch(zeros, zeros, np.arange(DRAWS), zeros)).token_ids
    kept = np.cumsum(p[:10]) / p[:10].sum()
    size = int(np.searchsorted(kept, 0.9)) + 1
    counts = np.bincount(drawn, minlength=size)
    assert len(counts) == size
    assert stats.chisquare(counts, p[:size] / p[:size].sum() * DRAWS).pvalue > 1e-3


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e4])
def test_extreme_temperatures_and_logits_give_no_nan(temperature: float, fields: dict[str, Any]) -> None:
    logits = torch.full((1, 300), -3e38)
    logits[0, 7], logits[0, 9], logits[0, 11] = 3e38, 2.9e38, -torch.inf
    r = Request(SamplingParams(temperature=temperature, logprobs=3, **fields))
    for mode in ("raw_logprobs", "processed_logprobs"):
        got = sampler_for([r], 300, mode).sample(logits, batch_of([r]))
        assert got.token_ids.tolist() == [7] and got.logprobs is not None and got.logprobs[0] == 0.0
        assert got.top is not None and not np.isnan(got.top.logprobs).any()


def test_a_row_with_nothing_to_sample_is_refused_by_slot_and_the_rest_can_go_on() -> None:
    rows = [Request(SamplingParams()), Request(SamplingParams(allowed_token_ids=[5])), Request(SamplingParams())]
    sampler = sampler_for(rows, 50)
    logits = torch.zeros(3, 50)
    logits[1, 5] = -torch.inf
    with pytest.raises(NothingToSample, match=r"slots \[1\].*loosen") as caught:
        sampler.sample(logits, batch_of(rows))
    assert caught.value.rows.tolist() == [1] and sampler.counters["steps"] == 0
    for broken in (torch.nan, torch.inf):
        logits[2, 3] = broken
        with pytest.raises(NothingToSample, match=r"slots \[2\].*NaN or \+inf"):
            sampler.sample(logits[2:], batch_of(rows[2:], slots=[2]))
    assert sampler.sample(logits[:1], batch_of(rows[:1])).token_ids.shape == (1,)


def test_wrong_arguments_are_named() -> None:
    rows = [Request(SamplingParams())]
    sampler, batch = sampler_for(rows, 50), batch_of(rows)
    good = torch.zeros(1, 50)
    with pytest.raises(InvalidArgument, match="logits is torch.float64"):
        sampler.sample(good.double(), batch)
    with pytest.raises(InvalidArgument, match=r"allowed: torch.float32 \(M, 50\)"):
        sampler.sample(torch.zeros(1, 51), batch)
    with pytest.raises(InvalidArgument, match="strides"):
        sampler.sample(torch.zeros(1, 100)[:, ::2], batch)
    with pytest.raises(Unsupported, match="logits are on meta"):
        sampler.sample(torch.zeros(1, 50, device="meta"), batch)
    with pytest.raises(InvalidArgument, match="logit_index runs from 1 to 1; allowed: 0 to 0"):
        sampler.sample(good, batch_of(rows, index=[1]))
    with pytest.raises(InvalidArgument, match="positions runs from -1"):
        sampler.sample(good, replace(batch, positions=np.array([-1])))
    with pytest.raises(InvalidArgument, match=r"positions has shape \(2,\)"):
        sampler.sample(good, replace(batch, positions=np.arange(2)))
    with pytest.raises(InvalidArgument, match="slots runs from 1"):
        sampler.sample(good, batch_of(rows, slots=[1]))
    with pytest.raises(InvalidArgument, match="token_mask is float64"):
        sampler.sample(good, replace(batch, token_mask=np.zeros((1, 50))))
    sampler.state.release(np.array([0]))
    with pytest.raises(InvalidArgument, match=r"slots \[0\] were never admitted"):
        sampler.sample(good, batch)
    with pytest.raises(InvalidArgument, match="logprobs_mode is 'raw'"):
        Sampler(sampler.state, logprobs_mode="raw")  # type: ignore[arg-type]
