"""``/v1/completions``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ramet.errors import shown
from ramet.frontend.client import Prompt
from ramet.outputs import CompletionOutput, RequestOutput
from ramet.server.answers import Writer, answer
from ramet.server.asked import read_asked
from ramet.server.body import flag, read_json
from ramet.server.errors import ApiError
from ramet.server.fields import COMPLETIONS
from ramet.server.state import new_id, state_of


async def completions(request: Request) -> Response:
    """Continue one prompt or many, each n times."""
    state = state_of(request)
    state.check_ready()
    body = await read_json(request, max_bytes=state.config.max_body_bytes)
    fields = COMPLETIONS.check(body, unknown=state.config.unknown_fields)
    state.check_model(fields.get("model"))
    defaults = state.llm.model_defaults
    asked = read_asked(fields, state.config, defaults, is_chat=False, max_model_len=state.llm.max_model_len)
    prompts = as_prompts(fields.get("prompt"))
    if not flag(fields, "add_special_tokens", True):
        encode = state.llm.tokenizer.encode
        prompts = [encode(p, add_special_tokens=False) if isinstance(p, str) else p for p in prompts]
    public_id = new_id("cmpl", request)
    writer = CompletionWriter(public_id, fields.get("model") or state.names[0], asked, state.llm.tokenizer)
    return await answer(request, state, public_id, prompts, asked, writer)


def as_prompts(value: Any) -> list[Prompt]:
    """Return the prompts of a request: a text, token ids, or a list of them.

    Examples
    --------
    >>> as_prompts("a"), as_prompts([1, 2]), as_prompts([[1], [2]])
    (['a'], [[1, 2]], [[1], [2]])
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(_is_id(item) for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and all(_is_id(token) for token in item) for item in value):
            return value
    raise ApiError(
        400,
        f"prompt is {shown(value)}; allowed: a text, a list of token ids, or a list of one kind of them.",
        param="prompt",
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class CompletionWriter(Writer):
    """Writes the answers of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets: dict[int, int] = {}  # of streamed choices: where the next token's text begins

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return a whole choice."""
        logprobs = None
        if self.asked.logprobs is not None:
            ids, entries = list(sample.token_ids), list(sample.logprobs or ())
            if self.asked.echo and output.prompt_logprobs is not None:
                ids = output.prompt_token_ids + ids
                entries = list(output.prompt_logprobs) + entries
            logprobs = self.forms.completion(ids, entries, 0)
        text = self._prompt_text(output) + sample.text if self.asked.echo else sample.text
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            **self._ids(output, sample, with_prompt=True),
            **self._prompt_logprobs(output),
        }

    def part(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return what is new of a choice."""
        logprobs = None
        if sample.logprobs is not None:
            offset = self._offsets.get(index, 0)
            logprobs = self.forms.completion(sample.token_ids, sample.logprobs, offset)
            self._offsets[index] = offset + len(self.tokenizer.decode(sample.token_ids))
        return {
            "index": index,
            "text": sample.text,
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            **self._ids(output, sample, with_prompt=False),
        }

    def first_parts(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the prompt, where it was asked for."""
        if not (self.asked.echo or self.asked.return_token_ids):
            return []
        text = self._prompt_text(output) if self.asked.echo else ""
        ids = {"prompt_token_ids": output.prompt_token_ids} if self.asked.return_token_ids else {}
        wanted = output.outputs if self.asked.echo else output.outputs[:1]  # ids: once for all samples of a prompt
        for sample in wanted:
            self._offsets[self._index(number, sample.index)] = len(text)
        return [
            {
                "index": self._index(number, sample.index),
                "text": text,
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
                **(ids if sample.index == 0 else {}),
            }
            for sample in wanted
        ]

    def _prompt_text(self, output: RequestOutput) -> str:
        return self.tokenizer.decode(output.prompt_token_ids) if output.prompt is None else output.prompt

    def _ids(self, output: RequestOutput, sample: CompletionOutput, *, with_prompt: bool) -> dict[str, Any]:
        if not self.asked.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": output.prompt_token_ids} if with_prompt else {}
        return {"token_ids": sample.token_ids, **prompt, **self.resuming(output, sample)}

    def _prompt_logprobs(self, output: RequestOutput) -> dict[str, Any]:
        if self.asked.params.prompt_logprobs is None or output.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": self.forms.prompt(output.prompt_logprobs)}
