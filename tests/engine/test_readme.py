"""The first example of the README does what its comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.mark.model
def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    names: dict[str, object] = {}
    exec(found[1], names)
    lines = capsys.readouterr().out.splitlines()
    samples = [line for line in lines if re.match(r"[0-7] (stop|length) ", line)]
    assert len(samples) >= 8
    prompt = names["answer"].prompt_token_ids  # type: ignore[attr-defined]
    assert lines[-1] == str(len(prompt)), "the prompt's tokens, once: not eight times"
