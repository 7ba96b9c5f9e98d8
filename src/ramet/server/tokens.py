"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from ramet.async_llm import LONG_TEXT
from ramet.errors import shown
from ramet.server.body import flag, read_json
from ramet.server.chat import chat_ids
from ramet.server.errors import ApiError
from ramet.server.fields import DETOKENIZE, TOKENIZE
from ramet.server.sse import json_response
from ramet.server.state import state_of


async def tokenize(request: Request) -> Response:
    """Return the ids of a text or of a conversation."""
    state = state_of(request)
    state.check_ready()
    body = await read_json(request, max_bytes=state.config.max_body_bytes)
    fields = TOKENIZE.check(body, unknown=state.config.unknown_fields)
    state.check_model(fields.get("model"))
    tokenizer = state.llm.tokenizer
    if "messages" in fields:
        ids = chat_ids(tokenizer, fields)
    else:
        text = fields.get("prompt")
        if not isinstance(text, str):
            raise ApiError(400, f"prompt is {shown(text)}; allowed: a text, or messages instead.", param="prompt")
        special = flag(fields, "add_special_tokens", True)
        if len(text) > LONG_TEXT:
            ids = await asyncio.to_thread(tokenizer.encode, text, special)
        else:
            ids = tokenizer.encode(text, special)
    texts = {"token_strs": [tokenizer.token_text(i) for i in ids]} if flag(fields, "return_token_strs") else {}
    return json_response({"count": len(ids), "max_model_len": state.llm.max_model_len, "tokens": ids, **texts})


async def detokenize(request: Request) -> Response:
    """Return the text of ids."""
    state = state_of(request)
    state.check_ready()
    body = await read_json(request, max_bytes=state.config.max_body_bytes)
    fields = DETOKENIZE.check(body, unknown=state.config.unknown_fields)
    state.check_model(fields.get("model"))
    ids, limit = fields.get("tokens"), state.llm.client.engine.vocab_size
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ApiError(400, f"tokens is {shown(ids)}; allowed: a list of token ids.", param="tokens")
    bad = next((i for i in ids if not 0 <= i < limit), None)
    if bad is not None:
        raise ApiError(400, f"tokens has {shown(bad)}; allowed: 0 to {limit - 1}.", param="tokens")
    return json_response({"prompt": state.llm.tokenizer.decode(ids, flag(fields, "skip_special_tokens"))})
