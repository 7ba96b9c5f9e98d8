"""The three lists of fields: apart from each other, and as the documentation has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import Server

from ramet.server.fields import CHAT, COMPLETIONS, IGNORED, FieldLists

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("lists", [COMPLETIONS, CHAT])
def test_a_field_is_in_one_list_and_what_works_or_does_nothing_is_documented(lists: FieldLists) -> None:
    names = [*lists.implemented, *lists.ignored, *lists.refused]
    assert len(names) == len(set(names))
    for name in (*lists.implemented, *lists.ignored):
        assert f"`{name}`" in PAGE, name


@pytest.mark.parametrize("name", IGNORED)
def test_fields_without_effect_are_taken(tiny: Server, name: str) -> None:
    asked: dict[str, Any] = dict(prompt="same", seed=1, max_tokens=4)
    texts = [tiny.complete(**asked, **extra)["choices"][0]["text"] for extra in ({}, {name: "anything"})]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("path", "lists", "base"),
    [
        ("/v1/completions", COMPLETIONS, {"prompt": "x"}),
        ("/v1/chat/completions", CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_refused_fields_are_named_and_null_is_absent(
    tiny: Server, path: str, lists: FieldLists, base: dict[str, Any]
) -> None:
    for name in lists.refused:
        error = tiny.post(path, {**base, name: True}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported")
    nulls = dict.fromkeys((*lists.refused, "temperature", "seed", "whatever"))
    assert tiny.post(path, {**base, **nulls, "max_tokens": 1}).status_code == 200
