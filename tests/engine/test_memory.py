"""Memory of the main job on the real model: one prompt and its tails, and weights that are there once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, resource, sys
from ramet import LLM, SamplingParams
from ramet.models.registry import resolve
resolve("smollm2-135m").gguf_file.converted()  # a warm cache; converting itself takes more
with LLM("smollm2-135m", dtype="float32", max_model_len=640, num_threads=1) as llm:
    client = llm.client
    params = SamplingParams(n=256, max_tokens=64, ignore_eos=True, seed=1)
    request, output = client.request(list(range(100, 612)), params)
    client.submit(request, output)
    pages = 0
    while not output.finished:
        client.step()
        pages = max(pages, llm.stats()["pages_in_use"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"kv": pages * llm.memory.page_bytes, "token": llm.memory.page_bytes / 16, "peak": peak}))
"""


@pytest.mark.soak
@pytest.mark.model
def test_256_samples_of_512_tokens_take_one_prompt_and_256_tails_and_less_than_2_gib() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["token"] == 2 * 30 * 3 * 64 * 4, "K and V, layers, heads, numbers of a head, bytes of a number"
    assert found["kv"] < 1.1 * found["token"] * (512 + 256 * 64)
    assert found["peak"] < 2 << 30
