"""``ramet generate``: prompts from everywhere, every parameter applied, output that a later run goes on with."""

from __future__ import annotations

import fcntl
import json
import logging
from pathlib import Path

import pytest
from cli_fakes import Shell


@pytest.fixture
def shell() -> Shell:
    return Shell()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_one_sample_prints_its_bare_text(shell: Shell) -> None:
    assert shell.run("generate", "m", "--prompt", "Hi") == 0
    assert shell.out == "Hi|0|0\n"
    assert shell.llm is not None
    assert shell.llm.closed


def test_n_samples_are_numbered_and_prompts_titled(shell: Shell) -> None:
    assert shell.run("generate", "m", "--prompt", "A", "--prompt", "B", "-n", "2") == 0
    assert shell.out.splitlines() == [
        "=== prompt 0 ===",
        "--- sample 0 (2 tokens, length) ---",
        "A|0|0",
        "--- sample 1 (2 tokens, length) ---",
        "A|0|1",
        "=== prompt 1 ===",
        "--- sample 0 (2 tokens, length) ---",
        "B|1|0",
        "--- sample 1 (2 tokens, length) ---",
        "B|1|1",
    ]


def test_stdin_is_one_prompt_as_it_is(shell: Shell) -> None:
    assert shell.run("generate", "m", stdin="two\nlines\n") == 0
    assert shell.out == "two\nlines\n|0|0\n"


def test_no_prompt_on_a_terminal_is_an_error_and_not_a_wait(shell: Shell) -> None:
    assert shell.run("generate", "m", terminal=True) == 2
    assert "there is no prompt; give --prompt" in shell.err


def test_prompts_file_has_a_prompt_a_line_whatever_the_characters(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes("a\u2028b\r\nd\re\n\n c\x0b \n".encode())
    assert shell.run("generate", "m", "--prompts-file", str(file), "--output", "-") == 0
    assert [json.loads(line)["prompt"] for line in shell.out.split("\n")[:-1]] == ["a\u2028b", "d\re", " c\x0b "]


def test_jsonl_takes_every_kind_of_prompt_with_parameters_of_its_own(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    entries = [
        {"prompt": "t", "id": "first", "temperature": 0.5, "logit_bias": {"5": -1.0}},
        {"prompt_token_ids": [72, 105], "n": 2, "seed": 99},
        {"messages": [{"role": "user", "content": "q"}], "stop": ["x"]},
    ]
    file.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    assert shell.run("generate", "m", "--jsonl", str(file), "--output", "-", "--top-k", "9", "--token-ids") == 0
    found = [json.loads(line) for line in shell.out.splitlines()]
    assert [entry["seed"] for entry in found] == [0, 99, 2]
    assert [len(entry["samples"]) for entry in found] == [1, 2, 1]
    assert {entry["parameters"]["top_k"] for entry in found} == {9}
    assert found[0]["id"] == "first"
    assert found[0]["parameters"]["temperature"] == 0.5
    assert found[0]["parameters"]["logit_bias"] == {"5": -1.0}
    assert found[1]["prompt_token_ids"] == [72, 105]
    assert found[1]["samples"][1]["token_ids"] == [1, 7]
    assert found[2]["messages"] == entries[2]["messages"]
    assert found[2]["samples"][0]["text"].startswith("<user>q|")
    assert found[2]["parameters"]["stop"] == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[1]", "line 2 holds a list"),
        ('{"prompt": 3}', "line 2: prompt is 3"),
        ('{"prompt_token_ids": ["a"]}', "line 2: prompt_token_ids"),
        ('{"prompt_token_ids": [true]}', "line 2: prompt_token_ids"),
        ('{"messages": "x"}', "line 2: messages"),
        ('{"prompt": "x", "messages": []}', "line 2 has prompt and messages"),
        ('{"id": 3}', "line 2 has none"),
        ('{"prompt": "x", "temprature": 1}', "did you mean 'temperature'"),
        ('{"prompt": "x", "temperature": -1}', "line 2: temperature is -1"),
        ('{"prompt": "x", "n": "two"}', "line 2: n is 'two'"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "line 2: logit_bias has the key 'a'"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_sampled(shell: Shell, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    assert shell.run("generate", "m", "--jsonl", str(file)) == 2
    assert message in shell.err
    assert shell.err.count("\n") == 1
    assert shell.out == ""


def test_extra_fields_are_refused_or_carried_when_asked(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "x", "answer": 42}\n')
    assert shell.run("generate", "m", "--jsonl", str(file), "--output", "-") == 2
    assert "'answer'" in shell.err
    assert shell.run("generate", "m", "--jsonl", str(file), "--output", "-", "--keep-extra-fields") == 0
    assert json.loads(shell.out)["extra"] == {"answer": 42}


def test_chat_puts_prompts_into_the_template(shell: Shell) -> None:
    assert shell.run("generate", "m", "--chat", "--system", "S", "--prompt", "Hi") == 0
    assert shell.out == "<system>S<user>Hi|0|0\n"


def test_stdin_can_be_read_once_only(shell: Shell) -> None:
    assert shell.run("generate", "m", "--prompt", "-", "--jsonl", "-") == 2
    assert "once" in shell.err


@pytest.mark.parametrize("flag", ["--prompts-file", "--jsonl"])
def test_a_missing_or_empty_file_is_named(shell: Shell, tmp_path: Path, flag: str) -> None:
    assert shell.run("generate", "m", flag, str(tmp_path / "none")) == 2
    assert "No such file" in shell.err
    (tmp_path / "empty").write_text("\n\n")
    assert shell.run("generate", "m", flag, str(tmp_path / "empty")) == 2
    assert "holds no prompt" in shell.err


# --- parameters -------------------------------------------------------------------------------------------------------


def test_every_sampling_flag_reaches_the_engine(shell: Shell) -> None:
    flags = (
        "--n 3 --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --max-tokens 40 --min-tokens 2 --stop a --stop b "
        "--stop-token-ids 3 4 --ignore-eos --logprobs 2 --prompt-logprobs 1 --presence-penalty -1.5 "
        "--frequency-penalty 0.25 --repetition-penalty 1.1 --allowed-token-ids 1 2 3 --bad-words x "
        "--no-skip-special-tokens --include-stop-str-in-output --cache-salt s"
    )
    assert shell.run("generate", "m", "--prompt", "x", *flags.split(), "--logit-bias", '{"7": -2.5}') == 0
    assert shell.llm is not None
    (params,) = shell.llm.calls[0][1]
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (3, 0.5, 0.9, 5, 0.1)
    assert (params.max_tokens, params.min_tokens, params.stop, params.stop_token_ids) == (40, 2, ("a", "b"), (3, 4))
    assert (params.ignore_eos, params.logprobs, params.prompt_logprobs) == (True, 2, 1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1.5, 0.25, 1.1)
    assert (params.allowed_token_ids, params.bad_words, params.logit_bias) == ((1, 2, 3), ("x",), {7: -2.5})
    assert (params.skip_special_tokens, params.include_stop_str_in_output, params.cache_salt) == (False, True, "s")


def test_prompt_i_is_sampled_with_the_seed_plus_i(shell: Shell) -> None:
    assert shell.run("generate", "m", "--seed", str(2**64 - 1), "--prompt", "A", "--prompt", "B") == 0
    assert shell.llm is not None
    assert [p.seed for p in shell.llm.calls[0][1]] == [2**64 - 1, 0]
    assert shell.llm.config.seed == 2**64 - 1


def test_flags_come_before_the_models_defaults_and_those_before_the_commands(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.defaults = {"temperature": 0.6, "top_p": 0.95}
    assert shell.run("generate", "m", "--prompt", "x", "--temperature", "0.2") == 0
    assert shell.llm is not None
    (params,) = shell.llm.calls[0][1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.2, 0.95, 256)
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sampling:")]
    assert printed == [
        "sampling: n=1 (built-in), temperature=0.2 (flag), top_p=0.95 (generation_config), "
        "top_k=-1 (built-in), max_tokens=256 (command default)"
    ]


def test_max_tokens_of_the_model_holds_and_none_goes_up_to_the_context(shell: Shell) -> None:
    shell.defaults = {"max_tokens": 77}
    for flags, value in (((), 77), (("--max-tokens", "none"), None)):
        assert shell.run("generate", "m", "--prompt", "x", *flags) == 0
        assert shell.llm is not None
        assert shell.llm.calls[0][1][0].max_tokens is value or shell.llm.calls[0][1][0].max_tokens == value


def test_quiet_prints_no_sampling_line_and_no_bar(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run("generate", "m", "--prompt", "x", "-q") == 0
    assert capsys.readouterr().err == ""
    assert shell.llm is not None
    assert shell.llm.calls[0][2] is False


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--n", "0"], "n is 0"),
        (["--n", "1000000000"], "n is 1000000000; allowed: an integer from 1 to 16,384"),
        (["--n", "two"], "invalid int value: 'two'"),
        (["--max-tokens", "x"], "invalid integer or none value: 'x'"),
        (["--logit-bias", "[1]"], "--logit-bias"),
        (["--temprature", "1"], "did you mean '--temperature'"),
        (["--dtype", "int4"], "invalid choice: 'int4'"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--system", "x"], "--system needs --chat"),
        (["--token-ids"], "--token-ids needs --output"),
        (["--overwrite"], "--overwrite needs --output"),
        (["--no-detokenize"], "--no-detokenize needs --output"),
    ],
)
def test_bad_flags_are_one_clear_line_and_exit_code_2(shell: Shell, flags: list[str], message: str) -> None:
    assert shell.run("generate", "m", "--prompt", "x", *flags) == 2
    assert shell.err.startswith("ramet: error: ")
    assert message in shell.err
    assert shell.err.count("\n") == 1


def test_a_model_must_be_given(shell: Shell) -> None:
    assert shell.run("generate", "--prompt", "x") == 2
    assert "a model is missing" in shell.err


# --- the output file --------------------------------------------------------------------------------------------------


def test_a_record_has_prompt_samples_parameters_seed_and_versions(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    assert (
        shell.run("generate", "m", "--prompt", "é😀", "-n", "2", "--seed", "5", "-o", str(out), "--dtype", "float32")
        == 0
    )
    (entry,) = lines(out)
    assert entry["prompt"] == "é😀"
    assert "é😀" in out.read_text(encoding="utf-8")
    assert [s["text"] for s in entry["samples"]] == ["é😀|5|0", "é😀|5|1"]
    assert entry["samples"][0]["finish_reason"] == "length"
    assert entry["seed"] == 5
    assert entry["parameters"]["n"] == 2
    assert entry["parameters"]["max_tokens"] == 256
    assert entry["model"] == "m"
    assert entry["engine"] == {"dtype": "float32", "seed": 5}
    assert set(entry["versions"]) >= {"ramet", "torch", "python"}
    assert shell.out == ""


def test_a_second_run_does_only_what_is_missing_and_draws_the_same(shell: Shell, tmp_path: Path) -> None:
    out, whole = tmp_path / "o.jsonl", tmp_path / "w.jsonl"
    prompts = ["--prompt", "A", "--prompt", "B", "--prompt", "C"]
    assert shell.run("generate", "m", *prompts[:4], "-o", str(out)) == 0
    assert shell.run("generate", "m", *prompts, "-o", str(out)) == 0
    assert shell.llm is not None
    assert [p["prompt"] for p in shell.llm.calls[0][0]] == ["C"]
    assert shell.run("generate", "m", *prompts, "-o", str(whole)) == 0
    assert lines(out) == lines(whole)
    assert shell.run("generate", "m", *prompts, "-o", str(out)) == 0
    assert shell.llm.calls == []


def test_interrupting_keeps_what_is_finished_and_says_how_to_go_on(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    flags = ["--prompt", "A", "--prompt", "B", "--prompt", "C", "-n", "8", "--max-num-seqs", "1", "-o", str(out)]
    shell.interrupt_after = 2
    assert shell.run("generate", "m", *flags) == 130
    assert shell.err == "ramet: interrupted: 2 of 3 prompts are finished; the same command goes on from there\n"
    assert [entry["prompt"] for entry in lines(out)] == ["A", "B"]
    assert shell.llm is not None
    assert shell.llm.closed
    shell.interrupt_after = None
    assert shell.run("generate", "m", *flags) == 0
    assert [entry["prompt"] for entry in lines(out)] == ["A", "B", "C"]


def test_a_line_that_was_cut_off_is_done_again(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    flags = ["generate", "m", "--prompt", "A", "--prompt", "B", "-o", str(out)]
    assert shell.run(*flags) == 0
    expected = out.read_bytes()
    out.write_bytes(expected[:-9])
    assert shell.run(*flags) == 0
    assert out.read_bytes() == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "Z"], "prompt='A'"),
        (["--prompt", "A", "--temperature", "0.5"], "temperature=1.0"),
        (["--prompt", "A", "--seed", "3"], "seed=0"),
    ],
)
def test_going_on_with_another_prompt_or_parameter_is_refused(
    shell: Shell, tmp_path: Path, flags: list[str], message: str
) -> None:
    out = tmp_path / "o.jsonl"
    assert shell.run("generate", "m", "--prompt", "A", "-o", str(out)) == 0
    before = out.read_bytes()
    assert shell.run("generate", "m", *flags, "-o", str(out)) == 2
    assert message in shell.err
    assert "--overwrite" in shell.err
    assert out.read_bytes() == before
    assert shell.run("generate", "m", *flags, "-o", str(out), "--overwrite") == 0
    assert len(lines(out)) == 1


def test_a_file_that_is_no_result_is_left_alone(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("my notes\n")
    assert shell.run("generate", "m", "--prompt", "A", "-o", str(out)) == 2
    assert "is no result of ramet generate" in shell.err
    assert out.read_text() == "my notes\n"


def test_two_runs_do_not_write_one_file(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    with out.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert shell.run("generate", "m", "--prompt", "A", "-o", str(out)) == 2
    assert "in use by another run" in shell.err


def test_a_path_that_cannot_be_written_is_found_before_the_model_is_loaded(shell: Shell, tmp_path: Path) -> None:
    assert shell.run("generate", "m", "--prompt", "A", "-o", str(tmp_path / "no" / "o.jsonl")) == 2
    assert "cannot be written" in shell.err
    assert shell.llm is None


def test_the_root_logger_is_never_touched(shell: Shell) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    assert shell.run("generate", "m", "--prompt", "A", "-v", "--log-json") == 0
    assert (root.level, list(root.handlers)) == before
    assert not logging.getLogger("ramet").propagate


def test_json_log_lines_are_json(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run("generate", "m", "--prompt", "A", "--log-json") == 0
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [entry["level"] for entry in entries] == ["info"]
    assert entries[0]["message"].startswith("sampling:")
