"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ramet.errors import shown
from ramet.frontend.tokenizer import Tokenizer
from ramet.outputs import CompletionOutput, RequestOutput
from ramet.server.answers import Writer, answer
from ramet.server.asked import read_asked
from ramet.server.body import flag, read_json
from ramet.server.errors import ApiError
from ramet.server.fields import CHAT
from ramet.server.state import new_id, state_of


async def chat_completions(request: Request) -> Response:
    """Answer a conversation n times."""
    state = state_of(request)
    state.check_ready()
    body = await read_json(request, max_bytes=state.config.max_body_bytes)
    fields = CHAT.check(body, unknown=state.config.unknown_fields)
    state.check_model(fields.get("model"))
    defaults = state.llm.model_defaults
    asked = read_asked(fields, state.config, defaults, is_chat=True, max_model_len=state.llm.max_model_len)
    prompt = {"prompt_token_ids": chat_ids(state.llm.tokenizer, fields)}
    public_id = new_id("chatcmpl", request)
    writer = ChatWriter(public_id, fields.get("model") or state.names[0], asked, state.llm.tokenizer)
    return await answer(request, state, public_id, [prompt], asked, writer)


def chat_ids(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> list[int]:
    """Return a conversation as token ids, by the model's template.

    Raises
    ------
    ApiError, InvalidArgument, Unsupported
        It is no conversation, or the template refuses it, or there is none.
    """
    messages = fields.get("messages")
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        message = f"chat_template_kwargs is {shown(variables)}; allowed: an object."
        raise ApiError(400, message, param="chat_template_kwargs")
    reserved = {"messages", "add_generation_prompt"} & set(variables)
    if reserved:
        message = f"chat_template_kwargs has {min(reserved)!r}, which is a field of its own."
        raise ApiError(400, message, param="chat_template_kwargs")
    if not isinstance(messages, list) or not messages:
        message = f"messages is {shown(messages)}; allowed: a list of {{'role': ..., 'content': ...}}."
        raise ApiError(400, message, param="messages")
    plain = [_plain(message, i) for i, message in enumerate(messages)]
    text = tokenizer.render_chat(plain, flag(fields, "add_generation_prompt", True), **variables)
    # The template alone decides about BOS, unless somebody asks for another.
    return tokenizer.encode(text, flag(fields, "add_special_tokens"))


def _plain(message: Any, i: int) -> Any:
    """A message whose content is text; content in parts is joined, parts that are no text are refused."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                400,
                f"messages[{i}] has a part of type {shown(kind)}; allowed: text.",
                param="messages",
                code="unsupported",
            )
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


class ChatWriter(Writer):
    """Writes the answers of ``/v1/chat/completions``."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return a whole choice."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            **self._rest(output, sample),
        }

    def part(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return what is new of a choice."""
        return {"index": index, "delta": {"content": sample.text}, **self._rest(output, sample)}

    def first_parts(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the role of every choice."""
        ids = {"prompt_token_ids": output.prompt_token_ids} if self.asked.return_token_ids else {}
        return [
            {
                "index": sample.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
                **(ids if sample.index == 0 else {}),
            }
            for sample in output.outputs
        ]

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return what is said of the prompt."""
        (output,) = outputs
        extras: dict[str, Any] = {}
        if self.asked.return_token_ids:
            extras["prompt_token_ids"] = output.prompt_token_ids
        if self.asked.params.prompt_logprobs is not None and output.prompt_logprobs is not None:
            extras["prompt_logprobs"] = self.forms.prompt(output.prompt_logprobs)
        return extras

    def _rest(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if sample.logprobs is not None and self.asked.logprobs is not None:
            logprobs = self.forms.chat(sample.token_ids, sample.logprobs, self.asked.logprobs)
        ids = {"token_ids": sample.token_ids, **self.resuming(output, sample)} if self.asked.return_token_ids else {}
        return {
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            **ids,
        }
