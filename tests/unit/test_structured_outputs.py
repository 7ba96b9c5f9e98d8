"""Structured outputs: parameters, errors in words, grammars over a real vocabulary, n samples each with its matcher."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from harness import tiny_llm

from ramet import LLM, SamplingParams, StructuredOutputsParams
from ramet.errors import InvalidArgument
from ramet.frontend.structured import check, choice_grammar

pytest.importorskip("xgrammar")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "none of json, json_object, regex, choice, grammar"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"regex": ""}, "structured_outputs.regex is ''"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "yes"}, "a list of non-empty strings"),
        ({"choice": ["yes", ""]}, "non-empty"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": [1]}, "a JSON schema"),
        ({"json_object": 1}, "True or False"),
        ({"rejex": "a"}, "did you mean 'regex'"),
    ],
)
def test_parameters_are_checked_when_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": {"type": "blah"}}, 'structured_outputs.json cannot be used: Unsupported type "blah".'),
        ({"json": {"$ref": "#/nope"}}, "nope"),
        ({"regex": "(a"}, "not closed"),
        ({"grammar": "root ::= foo"}, "foo"),
        ({"grammar": 'other ::= "a"'}, "root"),
        ({"grammar": 'root ::= "\ud800"'}, "lone surrogate"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line_without_paths(fields: dict[str, Any], message: str) -> None:
    wanted = StructuredOutputsParams(**fields)
    with pytest.raises(InvalidArgument) as caught:
        check(wanted)
    text = str(caught.value)
    assert message in text and "\n" not in text
    assert not re.search(r"\.cc|/|\d\d:\d\d:\d\d", text.replace("#/nope", ""))


END = 95
"""The tiny model has no EOS; this is a letter that no test needs."""


@pytest.fixture(scope="module")
def llm() -> Any:
    with tiny_llm(max_num_seqs=4) as made:
        yield made


def texts(llm: LLM, n: int = 9, max_tokens: int = 40, **kind: Any) -> list[str]:
    """n samples of random weights, at a temperature that makes all allowed tokens likely; in waves of four."""
    wanted = StructuredOutputsParams(**kind)
    params = SamplingParams(
        n=n, temperature=2.0, max_tokens=max_tokens, seed=1, structured_outputs=wanted, stop_token_ids=[END]
    )
    (answer,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    return [sample.text for sample in answer.outputs]


def test_every_sample_follows_the_grammar_by_itself(llm: LLM) -> None:
    found = texts(llm, n=24, regex="[0-9]{3}-[a-c]{2}")
    assert all(re.fullmatch("[0-9]{3}-[a-c]{2}", text) for text in found)
    assert len(set(found)) > 12  # random weights: the samples went ways of their own


def test_choices_with_quotes_and_backslashes_come_out_as_they_are(llm: LLM) -> None:
    choices = ['say"no"', "a\\b"]
    assert set(texts(llm, n=24, choice=choices)) == set(choices)


def test_a_choice_is_quoted_for_the_grammar() -> None:
    assert choice_grammar(["\n", "é", "😀"]) == 'root ::= "\\u000a" | "\\u00e9" | "\\U0001f600"'


def test_json_of_a_schema_parses_and_fits(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
    }
    for text in texts(llm, json=schema):
        value = json.loads(text)
        assert 0 <= value["a"] <= 99 and value["b"] in ("x", "y")


def test_a_grammar_in_ebnf_is_followed(llm: LLM) -> None:
    assert set(texts(llm, n=16, grammar='root ::= "ab" ("c" | "d")')) == {"abc", "abd"}


def test_greedy_samples_and_neighbours_without_a_grammar(llm: LLM) -> None:
    constrained = SamplingParams(
        n=3,
        temperature=0,
        max_tokens=8,
        stop_token_ids=[END],
        structured_outputs=StructuredOutputsParams(regex="[xyz]{4}"),
    )
    free = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=8)
    (alone,) = llm.generate([[9, 9, 9]], free, use_tqdm=False)
    first, second = llm.generate([[5, 6, 7], [9, 9, 9]], [constrained, free], use_tqdm=False)
    assert len({sample.text for sample in first.outputs}) == 1
    assert re.fullmatch("[xyz]{4}", first.outputs[0].text)
    assert [s.token_ids for s in second.outputs] == [s.token_ids for s in alone.outputs]


def test_without_a_token_that_ends_a_text_there_is_an_error(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="stop_token_ids"):
        llm.generate([[5]], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), use_tqdm=False)
