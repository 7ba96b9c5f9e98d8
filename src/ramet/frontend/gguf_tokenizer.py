"""Builds a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from ramet.errors import ModelError, Unsupported
from ramet.frontend.pretokenizers import WordRule, word_rule

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type


def build_tokenizer(metadata: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    """Return the byte-level BPE tokenizer that a GGUF file describes.

    Parameters
    ----------
    metadata : dict
        As :func:`ramet.frontend.gguf_metadata.read_metadata` returns it.
    path : Path
        Named in errors.

    Raises
    ------
    Unsupported
        Another kind of tokenizer, or a pre-tokenizer that is not known exactly.
    ModelError
        The vocabulary or the merges are missing or do not fit together.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise Unsupported(
            f"{path} has a tokenizer of kind {kind!r}; only 'gpt2' (byte-level BPE) is built from a GGUF file. "
            "Give the original tokenizer instead: tokenizer='folder or hub name'."
        )
    rule = gguf_word_rule(metadata)
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    merges: list[str] = metadata.get("tokenizer.ggml.merges") or []
    if not tokens or not merges:
        raise ModelError(f"{path} has no {'tokenizer.ggml.merges' if tokens else 'tokenizer.ggml.tokens'}.")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{path} has {len(tokens)} tokens, but {len(types)} token types.")
    # Unused entries only pad the vocabulary to the weights' shape; no text makes them, and they stand for none.
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    tokenizer = _byte_level_bpe(vocab, merges, rule, path)
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            added = AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            (tokenizer.add_tokens if kind == _USER_DEFINED else tokenizer.add_special_tokens)([added])
            if tokenizer.token_to_id(token) != i:
                raise ModelError(f"{path}: token {token!r} stands twice in the vocabulary.")
    return tokenizer


def gguf_word_rule(metadata: dict[str, Any]) -> WordRule:
    """Return the word rule that the file names; a file that names none is refused."""
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        raise Unsupported(
            "the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre), so its tokens cannot be known. "
            "Give the original tokenizer instead: tokenizer='folder or hub name'."
        )
    return word_rule(str(name))


def _byte_level_bpe(vocab: dict[str, int], merges: list[str], rule: WordRule, path: Path) -> tokenizers.Tokenizer:
    # The byte alphabet has no space, so the first one separates the two halves of a merge.
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=rule.ignore_merges)
    except Exception as error:  # the library raises a bare Exception for a merge outside the vocabulary
        raise ModelError(f"{path}: vocabulary and merges do not fit together ({error}).") from None
    tokenizer = tokenizers.Tokenizer(model)
    if rule.normalizer is not None:
        tokenizer.normalizer = rule.normalizer()
    tokenizer.pre_tokenizer = rule.words()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
