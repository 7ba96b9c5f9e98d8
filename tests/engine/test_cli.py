"""The command on the real model: golden tokens, resuming, Ctrl-C, chat, benchmark, clear errors."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ramet import LLM
from ramet.cli.common import Context
from ramet.cli.main import main

pytestmark = pytest.mark.model
MODEL = ["smollm2-135m", "--dtype", "float32", "--kv-cache-memory-bytes", str(256 << 20)]
RAMET = [sys.executable, "-m", "ramet.cli.main"]


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str


def ramet(*argv: str, stdin: str = "", make_llm: Callable[..., Any] | None = None) -> Done:
    """Run a command in this process, with the real engine or a given one."""
    context = Context(stdin=io.StringIO(stdin), stdout=io.StringIO(), stderr=io.StringIO())
    if make_llm is not None:
        context.make_llm = make_llm
    code = main(argv, context)
    return Done(code, context.stdout.getvalue(), context.stderr.getvalue())  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2-135m", dtype="float32", kv_cache_memory_bytes=256 << 20) as made:
        yield made


@pytest.fixture
def shared(llm: LLM) -> Callable[..., Any]:
    """Commands that use one loaded model; it stays open behind them."""

    class Lent:
        def __enter__(self) -> LLM:
            return llm

        def __exit__(self, *error: object) -> None:
            pass

    return lambda model, **settings: Lent()


def entries(path: Path) -> list[dict[str, Any]]:
    """Lines come in the order in which prompts finish; here they are sorted by prompt."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(lines, key=lambda entry: entry["index"])


def test_jsonl_of_the_golden_prompts_gives_the_golden_tokens_and_resumes(
    shared: Callable[..., Any], golden: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    asked = [
        {"messages": [{"role": "user", "content": i["prompt"]}]} if i["kind"] == "chat" else {"prompt": i["prompt"]}
        for i in golden
    ]
    prompts.write_text("\n".join(map(json.dumps, asked)))
    flags = ["--temperature", "0", "--max-tokens", "32", "--ignore-eos", "--token-ids"]
    argv = ["generate", *MODEL, "--jsonl", str(prompts), *flags, "-o", str(out)]
    assert ramet(*argv, make_llm=shared).code == 0
    found = entries(out)
    for item, entry in zip(golden, found, strict=True):
        assert entry["prompt_token_ids"] == item["prompt_token_ids"]
        assert entry["samples"][0]["token_ids"] == item["greedy_token_ids"]
    kept = len(golden) - 2
    out.write_text("".join(json.dumps(entry) + "\n" for entry in found[:kept]) + '{"index": 2, "pro')
    assert ramet(*argv, make_llm=shared).code == 0
    assert f"{kept} of {len(golden)} prompts are finished already" in capsys.readouterr().err
    assert entries(out) == found


def test_n_samples_of_one_prompt_differ_and_come_again_with_the_same_seed(shared: Callable[..., Any]) -> None:
    argv = ["generate", *MODEL, "--prompt", "The tree", "-n", "6", "--max-tokens", "12", "--seed", "7", "-q", "-o", "-"]
    first, second = ramet(*argv, make_llm=shared), ramet(*argv, make_llm=shared)
    (entry,) = [json.loads(line) for line in first.stdout.splitlines()]
    assert len({sample["text"] for sample in entry["samples"]}) == 6
    assert second.stdout == first.stdout
    assert first.stderr == ""


def test_ctrl_c_leaves_whole_lines_and_a_second_run_draws_what_one_run_would_have(
    shared: Callable[..., Any], tmp_path: Path
) -> None:
    out, whole = tmp_path / "o.jsonl", tmp_path / "w.jsonl"
    prompts = tmp_path / "p.txt"
    prompts.write_text("".join(f"Story number {i}:\n" for i in range(36)))
    argv = ["generate", *MODEL, "--prompts-file", str(prompts), "--max-tokens", "10", "--max-num-seqs", "2"]
    process = subprocess.Popen(
        [*RAMET, *argv, "-o", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while not (out.exists() and out.stat().st_size) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("ramet: interrupted: ")
    assert 0 < len(entries(out)) < 36
    assert ramet(*argv, "-o", str(out), make_llm=shared).code == 0
    assert ramet(*argv, "-o", str(whole), make_llm=shared).code == 0
    assert sorted(entries(out), key=lambda e: e["index"]) == sorted(entries(whole), key=lambda e: e["index"])


def test_a_chat_takes_the_earlier_turns_from_the_cache(shared: Callable[..., Any], llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.stats()["cached_prompt_tokens"]
    lines = "My name is Ada. Say hello.\nWhat is my name?\n/exit\nnever\n"
    argv = ["chat", *MODEL, "--temperature", "0", "--max-tokens", "24", "-q"]
    done = ramet(*argv, stdin=lines, make_llm=shared)
    assert done.code == 0
    assert len(done.stdout.splitlines()) == 2
    # Turn two is turn one, its answer and the new question: all but the question was computed already.
    assert llm.stats()["cached_prompt_tokens"] - before > 40


def test_bench_throughput_reads_the_prefix_once_and_ends_in_json(shared: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    shape = ["--num-prompts", "2", "--n", "16", "--input-len", "192", "--output-len", "8", "--prefix-len", "64"]
    done = ramet("bench", "throughput", *MODEL, *shape, "--save-result", str(file), make_llm=shared)
    found = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(file.read_text()) == found
    assert found["total_output_tokens"] == 2 * 16 * 8
    assert found["shared_path_share"] > 0.5
    assert found["kv_tokens_read"] < 0.3 * found["kv_tokens_logical"]
    assert found["prefix_tokens_unique"] == 64 + 2 * 128
    assert found["prefix_tokens_logical"] == 2 * 16 * 192
    assert found["kv_pages_private"] == 2 * 16
    assert found["kv_pages_shared"] <= 4 + 8 + 8
    assert found["floor_seconds"] > 0
    assert found["floor_gemm_seconds"] > 0
    assert "Many samples" in done.stdout


def test_dummy_weights_need_no_weight_file(llm: LLM, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 49152}
    config |= {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 256, "rope_theta": 1e4, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm.tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    shape = ["--num-prompts", "1", "--n", "2", "--input-len", "8", "--output-len", "4", "--no-floor"]
    done = ramet("bench", "throughput", str(tmp_path), "--load-format", "dummy", *shape, "-q")
    assert json.loads(done.stdout.splitlines()[-1])["total_output_tokens"] == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "one two three", "--max-tokens", "9999"], "max_tokens"),
        (["--prompt", "", "--max-tokens", "4"], "empty"),
        (["--prompt", "x", "--allowed-token-ids", "50000"], "50000"),
        (["--prompt", "tree " * 9000], "max_model_len"),
    ],
)
def test_what_the_engine_refuses_is_one_clear_line_and_the_engine_goes_on(
    shared: Callable[..., Any], flags: list[str], message: str
) -> None:
    done = ramet("generate", *MODEL, *flags, "-q", make_llm=shared)
    assert done.code == 2
    assert done.stderr.startswith("ramet: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert done.stdout == ""
    assert ramet("generate", *MODEL, "--prompt", "x", "--max-tokens", "2", "-q", make_llm=shared).code == 0


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["/no/such/model"], 2, "/no/such/model"),
        (["smollm2-135x"], 2, "did you mean 'smollm2-135m'"),
        ([*MODEL[:3], "--kv-cache-memory-bytes", "1000"], 1, "kv_cache_memory_bytes"),
    ],
)
def test_a_model_that_cannot_start_is_one_clear_line(flags: list[str], code: int, message: str) -> None:
    done = ramet("generate", *flags, "--prompt", "x", "-q")
    assert done.code == code
    assert done.stderr.startswith("ramet: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_a_reader_that_has_gone_is_no_error() -> None:
    command = f"{sys.executable} -m ramet.cli.main doctor | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
