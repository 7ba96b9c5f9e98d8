"""An LLM without a model, for tests of the command line: it answers from prompt, seed and sample."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from ramet.cli.common import Context
from ramet.config import EngineConfig
from ramet.errors import InvalidArgument
from ramet.outputs import CompletionOutput, RequestOutput
from ramet.sampling_params import SamplingParams


class FakeTokenizer:
    """A token is a character."""

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        if not isinstance(messages[0], dict):
            raise InvalidArgument("messages[0] is no message")
        return [ord(c) for c in "".join(f"<{m['role']}>{m['content']}" for m in messages)]


class FakeLLM:
    """Stands where ``LLM`` stands; class attributes are set by a test before the command runs."""

    defaults: dict[str, Any]
    interrupt_after: int | None

    def __init__(self, model: str, **settings: Any) -> None:
        self.config = EngineConfig(model=model, **settings)
        self.tokenizer = FakeTokenizer()
        self.calls: list[tuple[Any, list[SamplingParams], bool]] = []
        self.closed = False
        self.defaults, self.interrupt_after, self.done = {}, None, 0

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def default_sampling_params(self) -> tuple[SamplingParams, dict[str, str]]:
        return SamplingParams(**self.defaults), dict.fromkeys(self.defaults, "generation_config")

    def generate(self, prompts: list[dict], params: list[SamplingParams], *, use_tqdm: bool) -> list[RequestOutput]:
        self.calls.append((prompts, params, use_tqdm))
        return [answer for _, answer in self._answers(prompts, params)]

    def as_completed(
        self, prompts: list[dict], params: list[SamplingParams], *, use_tqdm: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        self.calls.append((prompts, params, use_tqdm))
        return self._answers(prompts, params)

    def _answers(self, prompts: list[dict], params: list[SamplingParams]) -> Iterator[tuple[int, RequestOutput]]:
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            if self.interrupt_after is not None and self.done >= self.interrupt_after:
                raise KeyboardInterrupt
            self.done += 1
            yield i, self._answer(prompt, own)

    def _answer(self, prompt: dict, params: SamplingParams) -> RequestOutput:
        ids = prompt.get("prompt_token_ids") or [ord(c) for c in prompt["prompt"]]
        said = prompt.get("prompt") or "".join(map(chr, ids))
        samples = [
            CompletionOutput(k, text=f"{said}|{params.seed}|{k}", token_ids=[k, 7], finish_reason="length")
            for k in range(params.n)
        ]
        return RequestOutput("0", prompt.get("prompt"), ids, samples, finished=True)

    def stream(self, prompt: dict, params: SamplingParams) -> Iterator[RequestOutput]:
        self.calls.append((prompt, [params], False))
        whole = self._answer(prompt, params)
        text = whole.outputs[0].text
        for end in (3, 3, len(text)):
            whole.outputs[0].text = text[:end]
            yield whole

    def stats(self) -> dict[str, Any]:
        return {"steps": 3}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Shell:
    """Runs commands with a fake engine; the last engine is ``llm``."""

    def __init__(self) -> None:
        self.llm: FakeLLM | None = None
        self.defaults: dict[str, Any] = {}
        self.interrupt_after: int | None = None
        self.out = self.err = ""

    def run(self, *argv: str, stdin: str = "", terminal: bool = False) -> int:
        from ramet.cli.main import main

        def make(model: str, **settings: Any) -> FakeLLM:
            self.llm = FakeLLM(model, **settings)
            self.llm.defaults, self.llm.interrupt_after = self.defaults, self.interrupt_after
            return self.llm

        source = Terminal(stdin) if terminal else io.StringIO(stdin)
        context = Context(make_llm=make, stdin=source, stdout=io.StringIO(), stderr=io.StringIO())
        code = main(argv, context)
        self.out, self.err = context.stdout.getvalue(), context.stderr.getvalue()  # type: ignore[attr-defined]
        return code
