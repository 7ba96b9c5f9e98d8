"""Slots: admitted, edited, recorded, released; nothing inherited, nothing sized slots x vocabulary."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sampling_oracle import Request, edited

from ramet.errors import InvalidArgument
from ramet.sampling.pools import RowPool
from ramet.sampling.state import Draw, SamplingState
from ramet.sampling_params import SamplingParams

VOCAB = 60


def one(slot: int) -> np.ndarray:
    """A slot as an array."""
    return np.array([slot])


def edit(state: SamplingState, slots: list[int], logits: np.ndarray, num_output: list[int]) -> np.ndarray:
    """The edited logits of slots."""
    work = logits.copy()
    state.edits.apply(work, np.array(slots), np.array(num_output))
    return work


def test_admission_writes_every_field() -> None:
    state = SamplingState(6, VOCAB)
    full = SamplingParams(
        n=3, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, min_tokens=4, logprobs=2, presence_penalty=1.0
    )
    slots = np.array([1, 3, 4])
    state.admit(slots, full, -1, np.array([0, 1, 2]), np.arange(3), None, [2])
    assert (state.draw[slots] == Draw.FILTERED).all() and state.edited[slots].all()
    assert (state.inv_temperature[slots] == 2.0).all() and (state.top_k[slots] == 7).all()
    assert (state.min_tokens[slots] == 4).all() and (state.logprobs[slots] == 2).all()
    assert len(np.unique(state.stream[slots])) == 3
    state.release(slots)
    state.admit(slots, SamplingParams(n=3), 5, np.array([7, 8, 9]), np.arange(3))
    fresh = SamplingState(6, VOCAB)
    fresh.admit(slots, SamplingParams(n=3), 5, np.array([7, 8, 9]), np.arange(3))
    for name, array in vars(fresh).items():
        if isinstance(array, np.ndarray):
            assert np.array_equal(getattr(state, name)[slots], array[slots]), name
    assert (state.edits.number_of == -1).all() and len(state.edits) == 0


@pytest.mark.parametrize(
    "fields, draw",
    [
        ({"temperature": 0.0, "top_k": 5}, Draw.GREEDY),
        ({}, Draw.PLAIN),
        ({"top_k": VOCAB}, Draw.PLAIN),  # all tokens: no filter
        ({"top_k": VOCAB - 1}, Draw.FILTERED),
        ({"top_p": 0.99}, Draw.FILTERED),
        ({"min_p": 0.01}, Draw.FILTERED),
    ],
)
def test_the_tier_is_decided_at_admission(fields: dict[str, Any], draw: Draw) -> None:
    state = SamplingState(1, VOCAB)
    state.admit(one(0), SamplingParams(**fields), 0, one(0), np.arange(3))
    assert state.draw[0] == draw and not state.edited[0]


def test_memory_is_held_only_for_slots_that_use_penalties_and_goes_with_them() -> None:
    state = SamplingState(4096, 151_936)
    empty = state.nbytes
    assert empty < 4096 * 64
    state.admit(np.arange(2000), SamplingParams(n=2000), 0, np.arange(2000), np.arange(1000))
    assert state.nbytes == empty
    slots = np.arange(2000, 2016)
    said = np.random.default_rng(0).integers(0, 151_936, (16, 300))
    penalised = SamplingParams(n=16, repetition_penalty=1.1, bad_words=["x"])
    state.admit(slots, penalised, 0, np.arange(16), np.arange(1000), said, bad_words_ids=[[1, 2, 3]])
    assert 0 < state.nbytes - empty < 16 * 16 * 1000
    state.release(slots)
    assert state.nbytes == empty and len(state.edits) == 0


def test_admitting_and_recording_cost_little() -> None:
    slots, prompt = np.arange(1024), np.arange(2000)
    for fields in ({}, {"repetition_penalty": 1.2, "logit_bias": {5: 1.0}}):
        state = SamplingState(1024, 49_152)
        params = SamplingParams(n=1024, **fields)
        admits, records = [], []
        for _ in range(5):
            begin = time.perf_counter()
            state.admit(slots, params, 3, slots, prompt, None, [2])
            middle = time.perf_counter()
            state.record(slots, slots)
            records.append(time.perf_counter() - middle)
            admits.append(middle - begin)
            state.release(slots)
        assert min(admits) < 5e-3
        assert min(records) < (2e-3 if fields else 5e-5)


def test_edits_of_neighbours_stay_apart() -> None:
    rng = np.random.default_rng(0)
    rows = [
        Request(SamplingParams(repetition_penalty=1.5), prompt=[1, 2, 3], output=[3, 4, 4]),
        Request(SamplingParams(), output=[4, 4]),
        Request(SamplingParams(frequency_penalty=0.5, presence_penalty=-1.0), prompt=[1], output=[9, 9, 9]),
        Request(SamplingParams(allowed_token_ids=[3, 4, 5], logit_bias={4: 7.5}), output=[1]),
        Request(SamplingParams(), output=[7, 8], bad_words=[[7, 8, 9], [8, 10], [11], [6, 12]]),
        Request(SamplingParams(min_tokens=2, stop_token_ids=[20]), output=[1], eos=[2]),
        Request(SamplingParams(min_tokens=2, stop_token_ids=[20]), output=[1, 1], eos=[2]),
    ]
    state = SamplingState(len(rows), VOCAB)
    for slot, r in enumerate(rows):
        state.admit(one(slot), r.params, 0, one(0), np.array(r.prompt), np.array(r.output), r.eos, r.bad_words)
    logits = rng.normal(0, 3, (len(rows), VOCAB)).astype(np.float32)
    order = rng.permutation(len(rows)).tolist()
    got = edit(state, order, logits[order], [len(rows[i].output) for i in order])
    for i, slot in enumerate(order):
        np.testing.assert_allclose(got[i], edited(logits[slot], rows[slot]), rtol=1e-6, atol=1e-6)


class Slots(RuleBasedStateMachine):
    """Admissions, records and releases in any order against lists in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.state = SamplingState(6, VOCAB)
        self.rows: dict[int, Request] = {}
        self.rng = np.random.default_rng(0)

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        free = [slot for slot in range(6) if slot not in self.rows]
        if not free:
            return
        slots = data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
        token = st.integers(0, 3)
        params = SamplingParams(
            n=len(slots),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.25])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
            logit_bias=data.draw(st.sampled_from([None, {3: 1.0}])),
        )
        words = data.draw(st.lists(st.lists(token, min_size=1, max_size=4), max_size=2))
        prompt = data.draw(st.lists(token, max_size=4))
        length = data.draw(st.integers(0, 4))
        said_once = st.lists(token, min_size=length, max_size=length)
        output = data.draw(st.lists(said_once, min_size=len(slots), max_size=len(slots)))
        if data.draw(st.booleans()):
            output = [output[0]] * len(slots)
        given_ = np.array(output, dtype=int).reshape(len(slots), length)
        self.state.admit(np.array(slots), params, 0, np.arange(len(slots)), np.array(prompt), given_, [], words)
        for slot, said in zip(slots, output, strict=True):
            self.rows[slot] = Request(params, prompt=prompt, output=list(said), bad_words=words)

    @rule(data=st.data())
    def record(self, data: st.DataObject) -> None:
        if not self.rows:
            return
        slots = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        said = data.draw(st.lists(st.integers(0, 5), min_size=len(slots), max_size=len(slots)))
        self.state.record(np.array(slots, dtype=int), np.array(said, dtype=int))
        for slot, token in zip(slots, said, strict=True):
            self.rows[slot].output = [*self.rows[slot].output, token]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.rows:
            slots = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
            self.state.release(np.array(slots, dtype=int))
            for slot in slots:
                del self.rows[slot]

    @invariant()
    def edits_are_those_of_the_lists(self) -> None:
        assert sorted(np.flatnonzero(self.state.occupied).tolist()) == sorted(self.rows)
        if not self.rows:
            assert len(self.state.edits) == 0 and self.state.edits.counts.nbytes == 0
            return
        slots = sorted(self.rows)
        logits = self.rng.normal(0, 3, (len(slots), VOCAB)).astype(np.float32)
        got = edit(self.state, slots, logits, [len(self.rows[slot].output) for slot in slots])
        for i, slot in enumerate(slots):
            np.testing.assert_allclose(got[i], edited(logits[i], self.rows[slot]), rtol=1e-5, atol=1e-5)


Slots.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
test_any_history_of_slots = Slots.TestCase


def test_a_slot_inherits_no_tokens_while_its_neighbours_go_on() -> None:
    params = SamplingParams(n=2, frequency_penalty=1.0, bad_words=["x"])
    words = [[4, 5, 9]]
    state = SamplingState(4, VOCAB)
    state.admit(np.array([0, 1]), params, 0, np.arange(2), np.arange(3), np.array([3, 3, 4, 5]), [], words)
    state.release(one(0))
    state.admit(
        one(2), SamplingParams(frequency_penalty=1.0, bad_words=["x"]), 0, one(0), np.arange(3), None, [], words
    )
    zeros = np.zeros((2, VOCAB), dtype=np.float32)
    old, new = edit(state, [1, 2], zeros, [4, 0])
    assert old[[3, 4, 5, 9]].tolist() == [-2, -1, -1, -np.inf]
    assert (new == 0).all()
    state.record(np.array([1, 2]), np.array([4, 4]))
    old, new = edit(state, [1, 2], zeros, [5, 1])
    assert old[[3, 4, 5, 9]].tolist() == [-2, -2, -1, 0]
    assert np.flatnonzero(new).tolist() == [4] and new[4] == -1


def test_repeated_tokens_take_no_more_memory() -> None:
    state = SamplingState(1, VOCAB)
    state.admit(one(0), SamplingParams(frequency_penalty=1.0), 0, one(0), np.arange(3))
    state.record(one(0), one(7))
    before = state.nbytes
    for _ in range(200):
        state.record(one(0), one(7))
    assert state.nbytes == before
    assert edit(state, [0], np.zeros((1, VOCAB), dtype=np.float32), [201])[0, 7] == -201


def test_rows_are_lent_lowest_first_and_never_twice() -> None:
    pool = RowPool(10)
    assert pool.lend(np.array([4, 5, 6])).tolist() == [0, 1, 2]
    pool.take_back(np.array([5, 9]))
    assert pool.lend(np.array([0, 1])).tolist() == [1, 3] and pool.in_use == 4
    pool.take_back(np.arange(10))
    assert pool.capacity == 0 and pool.in_use == 0 and (pool.row_of == -1).all()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"slots": np.array([9])}, "allowed: an array of numbers from 0 to 3"),
    ({"slots": np.array([1, 1]), "sample_ids": np.arange(2)}, "each slot once"),
    ({"slots": np.array([0])}, r"slots \[0\] are occupied; release them"),
    ({"sample_ids": np.arange(2)}, "one number of at least 0 per slot"),
    ({"sample_ids": np.array([-1])}, "one number of at least 0 per slot"),
    ({"params": SamplingParams(logit_bias={VOCAB: 1.0})}, f"logit_bias holds token id {VOCAB}; .* 0 to {VOCAB - 1}"),
    ({"params": SamplingParams(allowed_token_ids=[99])}, "allowed_token_ids holds token id 99"),
    ({"params": SamplingParams(min_tokens=1, stop_token_ids=[99])}, "stop_token_ids holds token id 99"),
    ({"params": SamplingParams(repetition_penalty=2.0), "prompt_token_ids": np.array([99])}, "prompt_token_ids holds"),
    ({"bad_words_ids": [[1, 99]]}, "bad_words holds token id 99"),
    ({"bad_words_ids": [[]]}, "a word without tokens"),
    ({"output_token_ids": np.zeros((3, 2))}, r"shape \(3, 2\); allowed: \[T\]"),
]


@pytest.mark.parametrize("changes, message", BAD)
def test_wrong_admissions_are_named_and_admit_nothing(changes: dict[str, Any], message: str) -> None:
    state = SamplingState(4, VOCAB)
    state.admit(one(0), SamplingParams(), 0, one(0), np.arange(3))
    arguments: dict[str, Any] = {
        "slots": one(1), "params": SamplingParams(), "seed": 0, "sample_ids": one(0), "prompt_token_ids": np.arange(3),
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match=message):
        state.admit(**{**arguments, **changes})
    assert state.occupied.tolist() == [True, False, False, False] and len(state.edits) == 0
