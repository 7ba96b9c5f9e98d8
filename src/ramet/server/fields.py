"""The fields of requests in three lists: those that work, those that are taken and do nothing, those that are refused.

``docs/server.md`` shows the lists, and a test holds them together. A field that is null is a field that is not there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ramet.errors import nearest, shown
from ramet.server.errors import ApiError

log = logging.getLogger(__name__)

SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "prompt_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "cache_salt",
)
"""Fields that are SamplingParams' own, by the same name."""

_SHARED = (
    *SAMPLING,
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "logprobs",
    "response_format",
    "structured_outputs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "first_k",
    "first_sample_id",
    "add_special_tokens",
)

IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Taken, and without effect on the answer."""

_GUIDED = "use structured_outputs, such as {'regex': ...}"
_ALWAYS_REFUSED = {
    "best_of": "it ranks samples by their log-probability; ask for n with logprobs, and rank them yourself",
    "use_beam_search": "beam search is not supported",
    "length_penalty": "beam search is not supported",
    "early_stopping": "beam search is not supported",
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "guided_json_object": _GUIDED,
    "truncate_prompt_tokens": "prompts are never cut; cut it yourself",
    "priority": "requests are served in the order of their arrival",
    "spaces_between_special_tokens": "text is what its tokens say",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "kv_transfer_params": "the cache is not shared between servers",
}


@dataclass(frozen=True)
class FieldLists:
    """The three lists of one endpoint.

    Attributes
    ----------
    implemented, ignored : tuple of str
    refused : dict
        Field to the reason, with what to do instead.
    """

    implemented: tuple[str, ...]
    ignored: tuple[str, ...] = IGNORED
    refused: Mapping[str, str] = None  # type: ignore[assignment]

    def check(self, body: Mapping[str, Any], *, unknown: str) -> dict[str, Any]:
        """Return the fields that work and are not null.

        Parameters
        ----------
        body : mapping
            Of the request.
        unknown : {"refuse", "warn"}

        Raises
        ------
        ApiError
            A field is refused or not known.
        """
        found: dict[str, Any] = {}
        for name, value in body.items():
            if value is None:
                continue
            if name in self.implemented:
                found[name] = value
            elif name in self.refused:
                raise ApiError(400, f"{name} is not supported: {self.refused[name]}.", param=name, code="unsupported")
            elif name in self.ignored:
                _warn_once(f"{name} is taken and has no effect")
            elif unknown == "warn":
                _warn_once(f"there is no field {shown(name)}{nearest(name, self.implemented)} It is ignored")
            else:
                hint = nearest(name, [*self.implemented, *self.ignored])
                raise ApiError(400, f"there is no field {shown(name)}{hint}", param=name[:64], code="unknown_field")
        return found


COMPLETIONS = FieldLists(
    (*_SHARED, "prompt", "echo"),
    refused={
        **_ALWAYS_REFUSED,
        "suffix": "text is only ever continued at its end",
        "prompt_embeds": "prompts are text or token ids",
    },
)

CHAT = FieldLists(
    (
        *_SHARED,
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "add_generation_prompt",
        "chat_template_kwargs",
    ),
    refused={
        **_ALWAYS_REFUSED,
        "tools": "tool calls are not supported; describe the tools in a message and use structured_outputs",
        "tool_choice": "tool calls are not supported",
        "parallel_tool_calls": "tool calls are not supported",
        "functions": "tool calls are not supported",
        "function_call": "tool calls are not supported",
        "audio": "only text is supported",
        "modalities": "only text is supported",
        "mm_processor_kwargs": "only text is supported",
        "prediction": "predicted outputs are not supported",
        "web_search_options": "the server does not search the web",
        "reasoning_effort": "use chat_template_kwargs if the model's template has such a switch",
        "verbosity": "say it in a message",
        "echo": "use /v1/completions with the text of the conversation",
        "chat_template": "the model's own is used; for another one send the text to /v1/completions",
        "documents": "put them into a message",
        "continue_final_message": "send the text of the conversation to /v1/completions",
    },
)

TOKENIZE = FieldLists(
    (
        "model",
        "prompt",
        "messages",
        "add_special_tokens",
        "add_generation_prompt",
        "chat_template_kwargs",
        "return_token_strs",
    ),
    ignored=(),
    refused={"tools": "tool calls are not supported"},
)
DETOKENIZE = FieldLists(("model", "tokens", "skip_special_tokens"), ignored=(), refused={})
PAUSE = FieldLists(("mode",), ignored=(), refused={})
ABORT = FieldLists(("request_ids", "all"), ignored=(), refused={})

_warned: dict[str, None] = {}
_MOST_WARNINGS = 1000


def _warn_once(text: str) -> None:
    """Log a warning the first time; clients make up names without end, so the memory of them has one."""
    if text not in _warned and len(_warned) < _MOST_WARNINGS:
        _warned[text] = None
        log.warning("%s.", text)
