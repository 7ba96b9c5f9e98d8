"""Whether a request could ever be served, told from the numbers of a model alone: also far from the engine."""

from __future__ import annotations

from ramet.engine.group import GroupRequest
from ramet.errors import InvalidArgument, TooLong


def check_request(request: GroupRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse a request that could never be served.

    Parameters
    ----------
    request : GroupRequest
    vocab_size, max_model_len : int
        Of the model and its engine.

    Raises
    ------
    TooLong
        Prompt and output don't fit ``max_model_len``.
    InvalidArgument
        The prompt is empty, or an id is outside the vocabulary.
    """
    ids = request.prompt_token_ids
    if len(ids) == 0:
        raise InvalidArgument("the prompt is empty; allowed: at least one token.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidArgument(f"prompt token id {bad} is not in the vocabulary; allowed: 0 to {vocab_size - 1}.")
    if len(ids) + request.max_tokens > max_model_len or len(ids) >= max_model_len + (request.max_tokens == 0):
        raise TooLong(
            f"the prompt has {len(ids)} tokens and max_tokens is {request.max_tokens}; together at most "
            f"{max_model_len} (max_model_len) are allowed: shorten the prompt or raise max_model_len."
        )
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(request.params, name) or ():
            if token >= vocab_size:
                raise InvalidArgument(f"{name} has {token}; allowed: 0 to {vocab_size - 1}.")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(request.params, name)
        if count is not None and count > vocab_size:
            raise InvalidArgument(f"{name} is {count}; allowed: up to {vocab_size}, the vocabulary.")
