"""The examples in the docstrings of the attention library run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import ramet.attention

MODULES = [name for _, name, _ in pkgutil.walk_packages(ramet.attention.__path__, "ramet.attention.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_what_users_call_has_examples() -> None:
    finder = doctest.DocTestFinder()
    for name in ("plan", "forest_attention", "merge_states", "append_kv", "explain", "supports", "backend_order"):
        tests = finder.find(getattr(ramet.attention, name), name)
        assert any(test.examples for test in tests), name
