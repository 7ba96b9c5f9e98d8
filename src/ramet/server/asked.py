"""From the fields of a request to sampling parameters and the form of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ramet.errors import InvalidArgument, shown
from ramet.sampling_params import RequestOutputKind, SamplingParams
from ramet.server.body import flag, integer
from ramet.server.config import ServerConfig
from ramet.server.errors import ApiError
from ramet.server.fields import SAMPLING
from ramet.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True)
class Asked:
    """What a request asks for, besides its prompts.

    Attributes
    ----------
    params : SamplingParams
    stream, include_usage : bool
    logprobs : int or None
        Alternatives of sampled tokens in the answer; None = no log-probabilities.
    echo : bool
        The answer begins with the prompt.
    return_token_ids : bool
        Ids of prompts and samples, and what resuming a sample takes: its seed and sample id.
    tokens_as_ids : bool
        Tokens in log-probabilities are named ``token_id:123``.
    first_k : int or None
    first_sample_id : int
    """

    params: SamplingParams
    stream: bool = False
    include_usage: bool = False
    logprobs: int | None = None
    echo: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    first_k: int | None = None
    first_sample_id: int = 0


def read_asked(
    fields: Mapping[str, Any], config: ServerConfig, defaults: Mapping[str, Any], *, is_chat: bool, max_model_len: int
) -> Asked:
    """Check the fields of a request.

    Parameters
    ----------
    fields : mapping
        Those that work (see :class:`~ramet.server.fields.FieldLists`).
    config : ServerConfig
    defaults : mapping
        The model's own sampling parameters.
    is_chat : bool
        Which endpoint it is.
    max_model_len : int

    Raises
    ------
    ApiError, InvalidArgument
        A value is not allowed.
    """
    n = integer(fields, "n", 1, config.max_n)
    stream = flag(fields, "stream")
    echo = flag(fields, "echo")
    logprobs = _chat_logprobs(fields, config) if is_chat else integer(fields, "logprobs", 0, config.max_logprobs)
    values = {**defaults, **{name: fields[name] for name in SAMPLING if name in fields}}
    values["max_tokens"] = _max_tokens(fields, defaults, is_chat, max_model_len)
    values["logprobs"] = logprobs
    if echo and logprobs is not None:
        values["prompt_logprobs"] = max(logprobs, values.get("prompt_logprobs") or 0)
    prompt_logprobs = integer(values, "prompt_logprobs", 0, config.max_logprobs)
    if stream and prompt_logprobs is not None:
        raise ApiError(
            400,
            "prompt_logprobs, and echo with logprobs, are known at the end only; leave them out, or set stream to "
            "false.",
            param="stream",
        )
    if "logit_bias" in values:
        values["logit_bias"] = _bias(values["logit_bias"])
    return Asked(
        params=SamplingParams(
            **values,
            structured_outputs=_structured(fields),
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        ),
        stream=stream,
        include_usage=_include_usage(fields, stream),
        logprobs=logprobs,
        echo=echo,
        return_token_ids=flag(fields, "return_token_ids"),
        tokens_as_ids=flag(fields, "return_tokens_as_token_ids"),
        first_k=integer(fields, "first_k", 1, n or 1),
        first_sample_id=integer(fields, "first_sample_id", 0, 2**31 - 1) or 0,
    )


def _max_tokens(
    fields: Mapping[str, Any], defaults: Mapping[str, Any], is_chat: bool, max_model_len: int
) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",)
    for name in names:
        if name in fields:
            return integer(fields, name, 0, 2**31 - 1)
    if "max_tokens" in defaults:
        return min(int(defaults["max_tokens"]), max_model_len)
    return None if is_chat else 16


def _chat_logprobs(fields: Mapping[str, Any], config: ServerConfig) -> int | None:
    wanted, count = flag(fields, "logprobs"), integer(fields, "top_logprobs", 0, config.max_logprobs)
    if count is not None and not wanted:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    return (count or 0) if wanted else None


def _include_usage(fields: Mapping[str, Any], stream: bool) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        message = f"stream_options is {shown(options)}; allowed: {{'include_usage': true or false}}."
        raise ApiError(400, message, param="stream_options")
    if not stream:
        raise ApiError(400, "stream_options needs stream to be true.", param="stream_options")
    return flag(options, "include_usage")


def _bias(value: Any) -> dict[int, Any]:
    """The keys of JSON objects are strings; those of a logit bias are token ids."""
    if not isinstance(value, dict):
        raise ApiError(400, f"logit_bias is {shown(value)}; allowed: token ids to numbers.", param="logit_bias")
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise ApiError(400, f"logit_bias is {shown(value)}; allowed: token ids as keys.", param="logit_bias") from None


def _structured(fields: Mapping[str, Any]) -> StructuredOutputsParams | None:
    given = fields.get("structured_outputs")
    form = fields.get("response_format")
    found = None if form is None else _response_format(form)
    if given is None:
        return found
    if found is not None:
        raise ApiError(400, "give response_format or structured_outputs, not both.", param="structured_outputs")
    if not isinstance(given, dict):
        message = f"structured_outputs is {shown(given)}; allowed: an object such as {{'regex': ...}}."
        raise ApiError(400, message, param="structured_outputs")
    return _made(given, "structured_outputs")


def _response_format(form: Any) -> StructuredOutputsParams | None:
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        wrapper = form.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if not isinstance(schema, dict):
            message = "response_format has no json_schema.schema; allowed: a JSON schema there."
            raise ApiError(400, message, param="response_format")
        return _made({"json": schema}, "response_format")
    message = f"response_format is {shown(form)}; allowed: an object whose type is text, json_object or json_schema."
    raise ApiError(400, message, param="response_format")


def _made(fields: dict[str, Any], param: str) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**fields)
    except (InvalidArgument, TypeError) as error:
        raise ApiError(400, str(error), param=param) from None
