"""The LM evaluation harness against the server: a task of likelihoods and one of generation, from files.

Needs the command ``lm_eval`` on the path (``pip install 'lm-eval[api]' transformers``), in whatever environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import Server

from ramet.async_llm import AsyncLLM
from ramet.frontend.tokenizer import load_tokenizer
from ramet.models.registry import resolve

pytestmark = [
    pytest.mark.soak,
    pytest.mark.model,
    pytest.mark.skipif(
        shutil.which("lm_eval") is None, reason="the command lm_eval (package lm-eval) is not installed"
    ),
]

ITEMS = [
    ("The capital of France is", " Paris", " banana"),
    ("Two plus two is", " four", " giraffe"),
    ("The opposite of hot is", " cold", " seventeen"),
    ("Water freezes and becomes", " ice", " Tuesday"),
]
CHOOSE = """
task: ramet_choose
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{[right, wrong]}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WRITE = """
task: ramet_write
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{right}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0.0}
metric_list: [{metric: exact_match}]
"""


def test_a_small_task_of_the_harness_runs_end_to_end(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(dict(zip(("question", "right", "wrong"), i, strict=True))) for i in ITEMS))
    for name, text in (("choose", CHOOSE), ("write", WRITE)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", json.dumps(str(data))))
    llm = AsyncLLM("smollm2-135m", dtype="float32", kv_cache_memory_bytes=256 << 20, num_threads=1)
    server = Server(llm, served_model_name=["smollm2"]).wait_ready(120)
    try:
        results = run_harness(server, tmp_path)
    finally:
        server.close()
    assert results["ramet_choose"]["acc,none"] == 1.0
    assert 0 <= results["ramet_write"]["exact_match,none"] <= 1


def run_harness(server: Server, folder: Path) -> dict[str, dict[str, float]]:
    """Run both tasks; returns the harness's results by task."""
    tokenizer = load_tokenizer(resolve("smollm2-135m"))  # of a .gguf file, in the form that the harness reads
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    settings = {
        "model": "smollm2",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": folder,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 1,
        "max_retries": 1,
    }
    found = subprocess.run(
        [
            *("lm_eval", "run", "--model", "local-completions", "--tasks", "ramet_choose,ramet_write"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in settings.items())),
            *("--include_path", str(folder), "--output_path", str(folder / "out")),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OPENAI_API_KEY": "any"},
    )
    assert found.returncode == 0, found.stderr[-4000:]
    (file,) = (folder / "out").rglob("results*.json")
    results: dict[str, dict[str, float]] = json.loads(file.read_text())["results"]
    return results
