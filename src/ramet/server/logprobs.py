"""Log-probabilities in the forms of the two endpoints, and vLLM's form for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ramet.frontend.tokenizer import Tokenizer
from ramet.outputs import Logprob, TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have (a token that a mask forbids)."""

Entry = Mapping[int, Logprob] | None


class LogprobForms:
    """Writes log-probabilities.

    Parameters
    ----------
    tokenizer : Tokenizer
    tokens_as_ids : bool
        Name tokens ``token_id:123`` instead of by their text, which need not be unique.
    """

    def __init__(self, tokenizer: Tokenizer, tokens_as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, tokens_as_ids

    def completion(self, token_ids: Iterable[int], entries: Iterable[Entry], offset: int) -> dict[str, Any]:
        """Return the form of completions.

        Parameters
        ----------
        token_ids : iterable of int
        entries : iterable of mapping or None
            Each begins with the token itself.
        offset : int
            Where the text of the first token begins.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, entry in zip(token_ids, entries, strict=True):
            tokens.append(self._name(token))
            offsets.append(offset)
            offset += len(self._tokenizer.token_text(token))
            values.append(None if entry is None else _finite(entry[token].logprob))
            tops.append(None if entry is None else self._by_name(entry))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def chat(self, token_ids: Iterable[int], entries: Iterable[Entry], count: int) -> dict[str, Any]:
        """Return the form of chats, with the ``count`` likeliest tokens of each place."""
        content = []
        for token, entry in zip(token_ids, entries, strict=True):
            if entry is None:
                continue
            ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)
            content.append(
                self._chat_token(token, entry[token])
                | {"top_logprobs": [self._chat_token(i, one) for i, one in ranked[:count]]}
            )
        return {"content": content, "refusal": None}

    def prompt(self, entries: TokenLogprobs) -> list[dict[str, Any] | None]:
        """Return vLLM's form of a prompt's log-probabilities: token id to value, rank and text, None for the first."""
        return [
            None
            if entry is None
            else {
                str(i): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
                for i, one in entry.items()
            }
            for entry in entries
        ]

    def _chat_token(self, token: int, one: Logprob) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        text = self._tokenizer.token_text(token)
        data = text.encode() if raw is None else raw
        return {"token": self._name(token), "logprob": _finite(one.logprob), "bytes": list(data)}

    def _by_name(self, entry: Mapping[int, Logprob]) -> dict[str, float]:
        """Values by the text of their tokens; of several with the same text (parts of characters), the likeliest."""
        found: dict[str, float] = {}
        for token, one in entry.items():
            name, value = self._name(token), _finite(one.logprob)
            found[name] = max(value, found.get(name, value))
        return found

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)


def _finite(value: float) -> float:
    return max(value, LOWEST)
