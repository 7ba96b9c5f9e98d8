"""``ramet chat``: a conversation in the terminal. Every turn continues the last one, so its prefix is in the cache."""

from __future__ import annotations

import dataclasses
from contextlib import closing, suppress
from typing import Any

from ramet.cli.common import (
    Context,
    add_common_options,
    add_engine_options,
    add_sampling_options,
    effective_sampling,
    require_model,
)
from ramet.cli.options import Parser, Settings
from ramet.errors import RametError
from ramet.sampling_params import SamplingParams

USAGE = "MODEL [options]"
DESCRIPTION = "Talk with a model. Ctrl-C ends an answer; /reset forgets the conversation, /exit or Ctrl-D ends it."
_COMMANDS = "/reset  forget the conversation\n/stats  what the engine did\n/exit   end (also Ctrl-D)\n/help   this list"
_FOREIGN = ("n", "logprobs", "prompt_logprobs", "detokenize")


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    group = parser.add_argument_group("Conversation")
    parser.option(group, "--system", metavar="TEXT", help="System message.")
    add_sampling_options(parser, skip=_FOREIGN, max_tokens=None)
    add_engine_options(parser, seed_help="Of the answers: turn i is sampled with the seed plus i.")
    add_common_options(parser)


def run(settings: Settings, context: Context) -> int:
    """Run the command."""
    require_model(settings)
    with suppress(ImportError):
        import readline  # noqa: F401 - input() then edits lines and remembers them
    with context.start(settings) as llm:
        params = effective_sampling(llm, settings, {"max_tokens": None})
        conversation = Conversation(llm, params, settings["seed"], settings["system"])
        if context.stdin.isatty():
            context.write(f"{settings['model']}. {DESCRIPTION.partition('. ')[2]}")
        while (line := _read_line(context)) is not None:
            if not line.strip():
                continue
            if line.startswith("/"):
                if not _command(line.strip(), conversation, context):
                    break
                continue
            _answer(line, conversation, context)
    return 0


class Conversation:
    """Messages so far, and the model that answers them.

    Parameters
    ----------
    llm : LLM
    params : SamplingParams
    seed : int
        Turn i is sampled with ``seed + i``.
    system : str, optional
        First message.
    """

    def __init__(self, llm: Any, params: SamplingParams, seed: int, system: str | None) -> None:
        self.llm, self._params, self._seed, self._system = llm, params, seed, system
        self.messages: list[dict[str, str]] = []
        self._turn = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system is not None else []

    def answer(self, text: str, show: Any) -> None:
        """Answer a message; ``show`` receives the text bit by bit. An error leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self.llm.tokenizer.apply_chat_template(asked)
        params = dataclasses.replace(self._params, seed=(self._seed + self._turn) % 2**64)
        shown = ""
        try:
            with closing(self.llm.stream({"prompt_token_ids": ids}, params)) as stream:  # closing it aborts the rest
                for output in stream:
                    whole = output.outputs[0].text
                    show(whole[len(shown) :])
                    shown = whole
        except KeyboardInterrupt:
            show(" [stopped]")
        self.messages = [*asked, {"role": "assistant", "content": shown}]
        self._turn += 1


def _read_line(context: Context) -> str | None:
    """The next line, None at the end of input or on Ctrl-C at the prompt."""
    try:
        if context.stdin.isatty():
            return input("> ")
        line = context.stdin.readline()
        return line.rstrip("\n") if line else None
    except (EOFError, KeyboardInterrupt):
        context.write("")
        return None


def _command(line: str, conversation: Conversation, context: Context) -> bool:
    """Run a command; False ends the conversation."""
    if line in ("/exit", "/quit"):
        return False
    if line == "/reset":
        conversation.reset()
        context.write("(forgotten)")
    elif line == "/stats":
        context.write("\n".join(f"{name}: {value}" for name, value in conversation.llm.stats().items()))
    else:
        context.write(_COMMANDS if line == "/help" else f"There is no command {line}.\n{_COMMANDS}")
    return True


def _answer(text: str, conversation: Conversation, context: Context) -> None:
    try:
        conversation.answer(text, lambda piece: context.write(piece, end=""))
        context.write("")
    except RametError as error:  # too long a conversation, for one: say so and go on
        context.write("")
        context.stderr.write(f"ramet: error: {error} (/reset begins anew)\n")
