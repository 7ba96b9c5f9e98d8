"""``ramet chat``: turns build on each other, commands work, errors and interruptions leave the conversation whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cli_fakes import FakeLLM, Shell

from ramet.cli.chat import Conversation
from ramet.errors import InvalidArgument
from ramet.sampling_params import SamplingParams


@pytest.fixture
def shell() -> Shell:
    return Shell()


def prompts(llm: FakeLLM | None) -> list[str]:
    assert llm is not None
    return ["".join(map(chr, call[0]["prompt_token_ids"])) for call in llm.calls]


def test_every_turn_continues_the_last(shell: Shell) -> None:
    assert shell.run("chat", "m", "--system", "S", stdin="one\n\ntwo\n") == 0
    first, second = prompts(shell.llm)
    assert first == "<system>S<user>one"
    assert second == f"<system>S<user>one<assistant>{first}|0|0<user>two"
    assert shell.out == f"{first}|0|0\n{second}|1|0\n"  # streamed in pieces, whole in the end


def test_reset_forgets_all_but_the_system_message(shell: Shell) -> None:
    assert shell.run("chat", "m", "--system", "S", stdin="one\n/reset\ntwo\n") == 0
    assert prompts(shell.llm)[1] == "<system>S<user>two"


def test_exit_ends_it_and_other_commands_say_what_there_is(shell: Shell) -> None:
    assert shell.run("chat", "m", stdin="/stats\n/what\n/help\n/exit\nnever\n") == 0
    assert prompts(shell.llm) == []
    assert "steps: 3" in shell.out
    assert "There is no command /what." in shell.out
    assert shell.out.count("/reset  forget") == 2
    assert shell.llm is not None
    assert shell.llm.closed


def test_sampling_flags_apply_and_max_tokens_goes_up_to_the_context(shell: Shell) -> None:
    assert shell.run("chat", "m", "--temperature", "0.3", "--seed", "8", stdin="a\nb\n") == 0
    assert shell.llm is not None
    params = [call[1][0] for call in shell.llm.calls]
    assert [(p.temperature, p.seed, p.max_tokens, p.n) for p in params] == [(0.3, 8, None, 1), (0.3, 9, None, 1)]


def test_a_conversation_that_is_too_long_says_so_and_goes_on(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FakeLLM.stream

    def refuse_long(self: FakeLLM, prompt: dict, params: SamplingParams) -> Any:
        if len(prompt["prompt_token_ids"]) > 40:
            raise InvalidArgument("the prompt has too many tokens")
        return real(self, prompt, params)

    monkeypatch.setattr(FakeLLM, "stream", refuse_long)
    assert shell.run("chat", "m", stdin="one\n" + "x" * 50 + "\n/reset\ntwo\n") == 0
    assert "too many tokens (/reset begins anew)" in shell.err
    assert prompts(shell.llm) == ["<user>one", "<user>two"]


def test_ctrl_c_ends_an_answer_aborts_it_and_keeps_its_beginning() -> None:
    llm = FakeLLM("m")
    closed = []

    def stream(prompt: dict, params: SamplingParams) -> Iterator[Any]:
        output = llm._answer(prompt, params)
        try:
            output.outputs[0].text = "begin"
            yield output
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    llm.stream = stream  # type: ignore[method-assign]
    shown: list[str] = []
    conversation = Conversation(llm, SamplingParams(), 0, None)
    conversation.answer("hi", shown.append)
    assert "".join(shown) == "begin [stopped]"
    assert closed == [True]
    assert conversation.messages[-1] == {"role": "assistant", "content": "begin"}


def test_flags_that_make_no_sense_in_a_chat_are_unknown(shell: Shell) -> None:
    assert shell.run("chat", "m", "--n", "2") == 2
    assert "unrecognized argument '--n'" in shell.err
