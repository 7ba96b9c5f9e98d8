"""SamplingParams take every kind of number and list, keep Python's own, and refuse the rest in one line."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ramet.errors import InvalidArgument
from ramet.sampling_params import MAX_N, SamplingParams
from ramet.structured_outputs import StructuredOutputsParams

INTEGERS = ["n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs"]
REALS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32])
def test_numpy_integers_are_integers(name: str, kind: Any) -> None:
    value = getattr(SamplingParams(**{name: kind(3)}), name)
    assert value == 3 and type(value) is int


@pytest.mark.parametrize("name", REALS)
@pytest.mark.parametrize("given", [np.float32(0.5), np.float64(0.5), np.float16(0.5), Fraction(1, 2), np.int64(1), 1])
def test_real_numbers_become_floats(name: str, given: Any) -> None:
    value = getattr(SamplingParams(**{name: given}), name)
    assert value == given and type(value) is float


@pytest.mark.parametrize("name", [*INTEGERS, *REALS])
@pytest.mark.parametrize("given", [True, np.True_, "1", [1], 1j, float("nan"), float("inf"), 10**400, -(10**400)])
def test_what_is_no_number_in_range_is_refused_by_name(name: str, given: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is .*; allowed: ") as caught:
        SamplingParams(**{name: given})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("name", INTEGERS)
def test_a_float_is_no_integer(name: str) -> None:
    for given in (1.0, np.float64(2.0)):
        with pytest.raises(InvalidArgument, match=f"{name} is "):
            SamplingParams(**{name: given})


def test_every_number_of_the_class_is_checked() -> None:
    hints = {f.name: str(f.type) for f in dataclasses.fields(SamplingParams)}
    numbers = {name for name, hint in hints.items() if hint.split(" ")[0] in ("int", "float")}
    assert numbers == {*INTEGERS, *REALS}


def test_the_ends_of_the_ranges_are_allowed_and_what_is_beyond_is_not() -> None:
    ends: dict[str, tuple[list[Any], list[Any]]] = {
        "n": ([1, MAX_N], [0, -1, MAX_N + 1, 10**9]),
        "temperature": ([0, 1e4], [-1, -1e-9, 10001]),
        "top_p": ([1e-9, 1], [0, 1.01]),
        "top_k": ([-1, 0, 2**31 - 1], [-2, 2**31]),
        "min_p": ([0, 1], [-0.1, 1.1]),
        "max_tokens": ([0, None], [-1]),
        "seed": ([-(2**63), 2**64 - 1, None], [-(2**63) - 1, 2**64]),
        "presence_penalty": ([-2, 2], [-2.1, 2.1]),
        "repetition_penalty": ([1e-4, 1e4], [0, -1, 1e-300, 1e5]),
    }
    for name, (good, bad) in ends.items():
        for value in good:
            assert getattr(SamplingParams(**{name: value}), name) == value
        for value in bad:
            with pytest.raises(InvalidArgument, match=name):
                SamplingParams(**{name: value})


def test_lists_of_every_kind_become_tuples_of_python_integers() -> None:
    for given in ([3, 5], (3, 5), np.array([3, 5]), iter([np.int32(3), 5]), range(3, 6, 2)):
        assert SamplingParams(stop_token_ids=given).stop_token_ids == (3, 5)  # type: ignore[arg-type]
    params = SamplingParams(allowed_token_ids=np.array([3, 5]), logit_bias={np.int64(4): np.float32(0.5)})
    assert {type(i) for i in params.allowed_token_ids or ()} == {int}
    assert json.dumps(params.logit_bias) == '{"4": 0.5}'
    assert SamplingParams(stop="ab", bad_words="cd").stop == ("ab",)
    assert SamplingParams(stop="ab", bad_words="cd").bad_words == ("cd",), "a word, not its letters"
    nothing = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)
    assert nothing == SamplingParams() and hash(nothing) == hash(SamplingParams())


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": 5},
        {"stop": [""]},
        {"stop": b"x"},
        {"stop": [b"x"]},
        {"stop": ["x" * 1000, 7]},
        {"bad_words": {"x": 1}},
        {"stop_token_ids": 5},
        {"stop_token_ids": "57"},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [True]},
        {"stop_token_ids": np.array([1.0])},
        {"allowed_token_ids": []},
        {"logit_bias": [1, 2]},
        {"logit_bias": {"4": 1.0}},
        {"logit_bias": {4: "1"}},
        {"logit_bias": {4: 101}},
        {"logit_bias": {4: float("nan")}},
        {"ignore_eos": 1},
        {"ignore_eos": None},
        {"detokenize": False, "stop": "x"},
        {"min_tokens": 5, "max_tokens": 4},
        {"cache_salt": ""},
        {"cache_salt": 5},
        {"output_kind": "DELTA"},
        {"best_of": 4},
        {"temprature": 1.0},
    ],
)
def test_what_does_not_fit_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))) as caught:
        SamplingParams(**wrong)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_structured_outputs_are_an_object_of_their_own_and_end_where_their_grammar_does() -> None:
    with pytest.raises(InvalidArgument, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"json": {}})
    with pytest.raises(InvalidArgument, match="ignore_eos"):
        SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True), ignore_eos=True)
