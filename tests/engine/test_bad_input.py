"""Bad input through the Python API and the command line: one clear line each, and the engine goes on as before."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_all_free, tiny_llm

from ramet import LLM, RequestOutput, SamplingParams
from ramet.cli.common import Context
from ramet.cli.main import main
from ramet.config import EngineConfig
from ramet.errors import InvalidArgument, OutOfMemory, RametError, Unsupported

SHORT = SamplingParams(max_tokens=3)
SEEDED = SamplingParams(n=2, max_tokens=5, seed=3)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm() as made:
        yield made


@pytest.fixture(scope="module")
def answer(llm: LLM) -> RequestOutput:
    return llm.generate("abc", SEEDED, use_tqdm=False)[0]


@pytest.fixture
def unharmed(llm: LLM, answer: RequestOutput) -> Iterator[None]:
    """After a test nothing is left behind, and the engine answers as it did."""
    yield
    stats = llm.stats()
    assert not llm.engine.has_unfinished and not llm.engine.groups
    assert stats["pages_in_use"] == stats["samples_running"] == stats["groups_waiting"] == 0
    again = llm.generate("abc", SEEDED, use_tqdm=False)[0]
    assert [s.token_ids for s in again.outputs] == [s.token_ids for s in answer.outputs]


def refused(call: Callable[[], Any], words: str, kind: type[RametError] = InvalidArgument) -> None:
    """The call fails with one line, short enough to read, that says what is allowed."""
    with pytest.raises(kind, match=words) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and 20 < len(text) < 300, text


class Thing:
    """Something that no prompt is."""


NO_PROMPT = "prompt.*allowed: (text|'prompt'|integers|None)"
OUTSIDE = r"token id -?\d+ is not in the vocabulary; allowed"


def name_of(value: Any) -> str:
    """A case's name: what it is, without addresses, so that every process calls it the same."""
    return re.sub(r" at 0x\w+", "", ascii(value))[:40]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, NO_PROMPT),
        (5, NO_PROMPT),
        (1.5, NO_PROMPT),
        (True, NO_PROMPT),
        (float("nan"), NO_PROMPT),
        (b"x", NO_PROMPT),
        (bytearray(b"!!"), NO_PROMPT),
        ([memoryview(b"!!")], NO_PROMPT),
        (Thing(), NO_PROMPT),
        ({1, 2}, NO_PROMPT),
        (iter([1, 2]), NO_PROMPT),
        ([None], NO_PROMPT),
        (["a", 5], NO_PROMPT),
        ([5, "a"], NO_PROMPT),
        ([5.0], NO_PROMPT),
        ([[1, [2]]], NO_PROMPT),
        ([["a"]], NO_PROMPT),
        ([[True, False]], NO_PROMPT),
        ([[float("nan")]], NO_PROMPT),
        (np.array(5), NO_PROMPT),
        (np.array([1.5]), NO_PROMPT),
        (np.array([[[1]]]), NO_PROMPT),
        (torch.tensor([1.0]), NO_PROMPT),
        ({}, NO_PROMPT),
        ({"text": "x"}, NO_PROMPT),
        ({"prompt": "x", "multi_modal_data": {}}, NO_PROMPT),
        ({"prompt": 5}, NO_PROMPT),
        ({"prompt": 5, "prompt_token_ids": [1]}, NO_PROMPT),
        ({"prompt_token_ids": "abc"}, NO_PROMPT),
        ({"prompt_token_ids": {1: 2}}, NO_PROMPT),
        ({"prompt_token_ids": [1.5]}, NO_PROMPT),
        ({b"prompt": "x"}, NO_PROMPT),
        ("", "the prompt is empty; allowed: at least one token"),
        ([[]], "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ("\ufeff", "the prompt is empty"),  # no token of this tokenizer stands for it
        ([[95, 96]], "token id 96 is not in the vocabulary; allowed: 0 to 95"),
        ([[-1]], "token id -1 is not in the vocabulary; allowed: 0 to 95"),
        ([[10**9]], OUTSIDE),
        ([[-(10**30)]], OUTSIDE),
        ([[1], [10**30]], r"^prompts\[1\]: .*" + OUTSIDE),
        (["a", "", "b"], r"^prompts\[1\]: the prompt is empty"),
        (["a", {"promt": "b"}], r"^prompts\[1\]: the prompt has the keys \['promt'\]"),
        ("\ud800", r"'\\ud800' is no valid Unicode"),
        ("x" * 600, r"600 tokens.*at most 512 \(max_model_len\).*shorten the prompt or raise max_model_len"),
        (list(range(96)) * 6, "576 tokens.*max_model_len"),
        ("x" * 510, "510 tokens and max_tokens is 3; together at most 512"),
    ],
    ids=name_of,
)
def test_what_is_no_prompt(llm: LLM, unharmed: None, prompts: Any, words: str) -> None:
    refused(lambda: llm.generate(prompts, SHORT, use_tqdm=False), words)


def test_texts_that_look_odd_are_prompts(llm: LLM, unharmed: None) -> None:
    for prompt in (
        "a\0b",
        "a\ud7ffb",
        range(5),
        (1, 2),
        np.array([[1, 2], [3, 4]]),
        {"prompt": "a", "prompt_token_ids": [1]},
    ):
        assert all(output.finished for output in llm.generate(prompt, SHORT, use_tqdm=False))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (5, "sampling_params is 5; allowed: SamplingParams, or a list"),
        ({"n": 2}, "sampling_params is {'n': 2}"),
        (SamplingParams, "sampling_params is <class"),
        ("x", "sampling_params has 'x'; allowed: SamplingParams"),
        ([None], "sampling_params has None"),
        ([], "0 sampling_params for 1 prompts; allowed: one, or one per prompt"),
        ([SHORT, SHORT], "2 sampling_params for 1 prompts"),
    ],
)
def test_what_are_no_parameters(llm: LLM, unharmed: None, given: Any, words: str) -> None:
    refused(lambda: llm.generate("abc", given, use_tqdm=False), words)
    refused(lambda: list(llm.stream("abc", given)), words)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 10**6}, "max_tokens is 1000000; together at most 512"),
        ({"stop_token_ids": [96]}, "stop_token_ids has 96; allowed: 0 to 95"),
        ({"allowed_token_ids": [96]}, "allowed_token_ids has 96; allowed: 0 to 95"),
        ({"logit_bias": {96: 1.0}}, "logit_bias has 96; allowed: 0 to 95"),
        ({"logprobs": 97}, "logprobs is 97; allowed: up to 96"),
        ({"prompt_logprobs": 97}, "prompt_logprobs is 97; allowed: up to 96"),
    ],
)
def test_what_the_model_does_not_have(llm: LLM, unharmed: None, params: dict[str, Any], words: str) -> None:
    refused(lambda: llm.generate("abc", SamplingParams(**params), use_tqdm=False), words)


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 3},
        {"allowed_token_ids": [5], "bad_words": ["&"]},
    ],
)
def test_a_sample_that_may_not_draw_anything_is_aborted(llm: LLM, unharmed: None, params: dict[str, Any]) -> None:
    assert llm.tokenizer.encode("&") == [5]
    whole, none = llm.generate(["abc", "abc"], [SHORT, SamplingParams(**params)], use_tqdm=False)
    assert none.outputs[0].finish_reason == "abort" and none.outputs[0].token_ids == []
    assert whole.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages is None; allowed: a list of"),
        ("hi", "messages is 'hi'"),
        ([], r"messages is \[\]"),
        ([[]], r"messages is \[\]; allowed: a non-empty list"),
        ({"role": "user", "content": "x"}, "messages is {"),
        ([5], "messages is 5"),
        (["hi"], "messages is 'hi'"),
        ([{}], r"messages\[0\] is {}"),
        ([[{"role": "user", "content": "x"}, 5]], r"messages\[1\] is 5"),
        ([{"role": 5, "content": "x"}], r"messages\[0\] is .*'role'"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\['content'\] is 5; allowed: a string"),
        ([{"role": "user", "content": "x" * 600}], "max_model_len"),
    ],
)
def test_what_is_no_conversation(llm: LLM, unharmed: None, messages: Any, words: str) -> None:
    refused(lambda: llm.chat(messages, SHORT, use_tqdm=False), words)


@pytest.mark.parametrize(
    ("position", "index", "words"),
    [
        (0, 0, "position is 0; allowed: 1 to 8"),
        (9, 0, "position is 9; allowed: 1 to 8"),
        (10**30, 0, "position is 1000"),
        (float("nan"), 0, "position is nan"),
        (None, 0, "position is None"),
        (2, 2, "index is 2; allowed: 0 to 1"),
        (2, -1, "index is -1; allowed: 0 to 1"),
    ],
)
def test_what_is_no_place_to_fork(
    llm: LLM, answer: RequestOutput, unharmed: None, position: Any, index: Any, words: str
) -> None:
    refused(lambda: llm.fork(answer, position, index=index), words)


def test_what_is_no_answer_to_fork(llm: LLM, answer: RequestOutput, unharmed: None) -> None:
    for bad in (None, "x", answer.outputs[0], [answer]):
        refused(lambda bad=bad: llm.fork(bad, 2), "request is .*; allowed: an answer of this LLM")  # type: ignore[misc]
    for bad in (5, [SHORT, SHORT]):
        refused(lambda bad=bad: llm.fork(answer, 2, bad), "sampling_params")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, InvalidArgument, "max_num_batched_tokens is 32; allowed"),
        ({"max_model_len": 513}, InvalidArgument, "max_model_len is 513, but the model has 512 positions"),
        ({"kv_cache_memory_bytes": 1}, OutOfMemory, "kv_cache_memory_bytes gives 1 bytes.*set kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 1 << 60}, OutOfMemory, "this machine has .*lower it"),
        ({"kv_cache_memory_bytes": 1 << 16, "max_model_len": 512}, OutOfMemory, "or max_model_len lower"),
        ({"dtype": "float16"}, Unsupported, "dtype is 'float16'"),
        ({"tokenizer": "no/such/tokenizer.gguf"}, RametError, "no/such/tokenizer.gguf"),
        ({"max_num_sequences": 3}, InvalidArgument, "did you mean 'max_num_seqs'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], kind: type[RametError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        tiny_llm(**settings)
    assert "\n" not in str(caught.value)


def test_everything_is_free_in_the_end(llm: LLM, unharmed: None) -> None:
    refused(lambda: llm.generate(["fine", ""], SHORT, use_tqdm=False), "empty")
    assert_all_free(llm.engine)


# ---- the command line --------------------------------------------------------------------------------------------


class Lent:
    """The shared LLM; it stays open behind a command."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def __enter__(self) -> LLM:
        return self.llm

    def __exit__(self, *error: object) -> None:
        pass


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ramet(llm: LLM) -> Command:
    """Runs a command on streams as strict as the real ones."""

    def run(*argv: str, stdin: str = "", encoding: str = "utf-8") -> tuple[int, str, str]:
        def start(model: str, **settings: Any) -> Lent:
            EngineConfig(model=model, **settings)
            return Lent(llm)

        out, err = (io.TextIOWrapper(io.BytesIO(), encoding, write_through=True) for _ in range(2))
        code = main(argv, Context(make_llm=start, stdin=io.StringIO(stdin), stdout=out, stderr=err))
        return code, *(stream.buffer.getvalue().decode(encoding) for stream in (out, err))  # type: ignore[attr-defined]

    return run


def one_line(done: tuple[int, str, str], words: str) -> None:
    code, out, err = done
    assert code == 2 and out == ""
    assert err.startswith("ramet: error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert words in err, err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-n", "0"], "n is 0; allowed: an integer from 1 to 16,384"),
        (["-n", "1000000000"], "n is 1000000000; allowed"),
        (["-n", "two"], "-n/--n: invalid int value: 'two'"),
        (["--temperature", "-1"], "temperature is -1.0; allowed"),
        (["--temperature", "nan"], "temperature is nan; allowed"),
        (["--top-p", "0"], "top_p is 0.0; allowed"),
        (["--seed", str(10**30)], "seed is 1000"),
        (["--stop", ""], "stop is ''; allowed: non-empty strings"),
        (["--stop", "\udcff"], r"stop is '\udcff'; allowed: non-empty strings of valid Unicode"),
        (["--stop-token-ids", "96"], "stop_token_ids has 96; allowed: 0 to 95"),
        (["--logprobs", "97"], "logprobs is 97; allowed: up to 96"),
        (["--logit-bias", "{"], "invalid JSON object value"),
        (["--logit-bias", '{"1": 1e999}'], "logit_bias[1] is inf; allowed"),
        (["--max-tokens", "600"], "together at most 512"),
        (["--temprature", "1"], "did you mean '--temperature'"),
        (["more"], "unrecognized argument 'more'"),
        (["--page-size", "24"], "page_size is 24; allowed: 1, 2, 4"),
        (["--num-threads", "100000"], "num_threads is 100000; allowed: an integer from 1 to"),
        (["--kv-cache-memory-bytes", "-1"], "kv_cache_memory_bytes is -1; allowed"),
        (["--gpu-memory-utilization", "nan"], "gpu_memory_utilization is nan; allowed"),
        (["-tp", "2"], "tensor_parallel_size is 2; only 1"),
        (["--output", ""], "--output is empty; allowed"),
        (["--no-detokenize"], "--no-detokenize needs --output"),
    ],
    ids=name_of,
)
def test_flags(ramet: Command, unharmed: None, flags: list[str], words: str) -> None:
    one_line(ramet("generate", "m", "-q", "--prompt", "abc", "--max-tokens", "3", *flags), words)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("", "the prompt is empty"), ("x" * 600, "600 tokens"), ("\udcff", r"'\udcff' is no valid Unicode")],
    ids=["empty", "long", "surrogate"],
)
def test_prompts_of_flags(ramet: Command, unharmed: None, prompt: str, words: str) -> None:
    one_line(ramet("generate", "m", "-q", "--prompt", prompt), words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}", "is not valid JSON"),
        (b"\xff", "can't decode byte 0xff"),
        (b"[]", "holds a list; allowed: an object"),
        (b"{}", "has none of prompt, prompt_token_ids, messages; allowed: one"),
        (b'{"prompt": null}', "prompt is None; allowed: a string"),
        (b'{"prompt": ""}', "the prompt is empty"),
        (b'{"prompt": "\\ud800"}', r"'\ud800' is no valid Unicode"),
        (b'{"prompt_token_ids": [1e400]}', "prompt_token_ids is [inf]; allowed: a list of token ids"),
        (b'{"prompt_token_ids": [96]}', "token id 96 is not in the vocabulary; allowed: 0 to 95"),
        (b'{"prompt_token_ids": []}', "the prompt is empty"),
        (b'{"messages": []}', "messages is []; allowed"),
        (b'{"messages": [5]}', "messages[0] is 5; allowed"),
        (b'{"prompt": "a", "n": "2"}', "n is '2'; allowed"),
        (b'{"prompt": "a", "n": null}', "n is None; allowed"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature is nan; allowed"),
        (b'{"prompt": "a", "seed": 1e30}', "seed is 1e+30; allowed"),
        (b'{"prompt": "a", "id": [1]}', "id is [1]; allowed: a string or an integer"),
        (b'{"prompt": "a", "detokenize": false}', "detokenize is false, which needs --output"),
        (b'{"prompt": "a", "logit_bias": {"' + b"9" * 5000 + b'": 1}}', "logit_bias has the key '999"),
        (b'{"prompt": "a", "temprature": 1}', "unknown field 'temprature'; did you mean 'temperature'"),
    ],
    ids=name_of,
)
def test_lines_of_prompts_are_named(ramet: Command, unharmed: None, tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    done = ramet("generate", "m", "-q", "--jsonl", str(path), "--max-tokens", "3")
    one_line(done, words)
    assert str(path) in done[2] and ("line 2" in done[2] or "decode" in words) and len(done[2]) < 500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "holds a list; allowed: settings by name"),
        ('{"n": 0}', "n is 0; allowed"),
        ('{"n": "x"}', "invalid int value: 'x'"),
        ('{"n": [1, 2]}', "n is [1, 2]; allowed: one value"),
        ('{"chat": 1}', "chat is 1; allowed: true or false"),
        ('{"max-tokens": 4, "max_tokens": 3}', "'max_tokens' is there twice"),
        ('{"temprature": 1}', "there is no setting 'temprature'; did you mean 'temperature'"),
        ('{"stop": ["a", ""]}', "stop is ''; allowed"),
    ],
    ids=lambda value: value[:40],
)
def test_settings_of_a_file(ramet: Command, unharmed: None, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    one_line(ramet("generate", "m", "-q", "--prompt", "abc", "--config", str(path)), words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-prompts", "0"], "num_prompts is 0; allowed"),
        (["--n", "1000000000"], "n is 1000000000; allowed"),
        (["--input-len", "9999"], "together at most 512"),
        (["--output-len", "99999999999"], "max_tokens is 99999999999; allowed"),
        (["--num-warmups", "-1"], "num_warmups is -1; allowed"),
        (["--temperature", "nan"], "temperature is nan; allowed"),
        (["--save-result", "/"], "--save-result / cannot be written"),
        (["--save-result", "/no/such/folder/x"], "--save-result /no/such/folder/x cannot be written"),
    ],
)
def test_benchmarks(ramet: Command, unharmed: None, flags: list[str], words: str) -> None:
    small = ["--num-prompts", "1", "--n", "1", "--input-len", "4", "--output-len", "2", "--no-floor"]
    one_line(ramet("bench", "throughput", "m", "-q", *small, *flags), words)


def test_ids_that_no_encoding_holds_are_escaped(ramet: Command, unharmed: None, tmp_path: Path) -> None:
    """Half a surrogate pair in an id ended the run with a traceback, after all the work."""
    path, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    path.write_text('{"prompt": "abc", "id": "\\ud800"}\n{"prompt": "abd", "id": "\\u00e9"}\n')
    argv = ["generate", "m", "-q", "--jsonl", str(path), "--max-tokens", "3"]
    for encoding in ("utf-8", "ascii"):
        code, text, _ = ramet(*argv, encoding=encoding)
        assert code == 0 and "=== prompt \\ud800 ===" in text
        code, text, _ = ramet(*argv, "-o", "-", encoding=encoding)
        assert code == 0 and [json.loads(line)["id"] for line in text.splitlines()] == ["\ud800", "é"]
    assert ramet(*argv, "-o", str(out))[0] == 0
    lines = out.read_text(encoding="utf-8").splitlines()
    assert sorted(json.loads(line)["id"] for line in lines) == ["é", "\ud800"]
    assert ramet(*argv, "-o", str(out))[0] == 0, "it goes on from its own file"


def test_a_mark_of_byte_order_is_no_part_of_a_prompt(ramet: Command, tmp_path: Path) -> None:
    """Editors on Windows begin files with it."""
    prompts, config = tmp_path / "p.txt", tmp_path / "c.json"
    prompts.write_text("abc\n", encoding="utf-8-sig")
    config.write_text('{"max_tokens": 3}', encoding="utf-8-sig")
    argv = ["generate", "m", "-q", "--config", str(config), "-o", "-"]
    _, text, _ = ramet(*argv, "--prompts-file", str(prompts))
    assert json.loads(text)["prompt"] == "abc"


def test_a_chat_goes_on_after_an_error(ramet: Command, unharmed: None) -> None:
    code, out, err = ramet("chat", "m", "-q", "--max-tokens", "3", stdin=f"hello\n{'x' * 600}\n\udcff\n/reset\nhello\n")
    assert code == 0
    answers = [line for line in out.splitlines() if line and line != "(forgotten)"]
    assert len(answers) == 2 and len(err.splitlines()) == 2
    assert "max_model_len" in err and r"'\udcff'" not in out
