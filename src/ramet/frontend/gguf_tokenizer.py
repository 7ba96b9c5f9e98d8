"""Builds a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from ramet.errors import ModelError, Unsupported, shown
from ramet.frontend.pretokenizers import WordRule, word_rule

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # how SentencePiece writes a space
_TYPES: dict[str, Any] = {
    "model": str,
    "pre": str,
    "tokens": list[str],
    "token_type": list[int],
    "merges": list[str],
    "scores": list[float],
    **{f"{name}_token_id": int for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
}
_ELSE = "Give the original tokenizer instead: tokenizer='folder or hub name'."


def build_tokenizer(metadata: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer that a GGUF file describes: byte-level BPE (``gpt2``) or SentencePiece BPE (``llama``).

    Parameters
    ----------
    metadata : dict
        As :func:`ramet.models.gguf_metadata.read_metadata` returns it.
    path : Path
        Named in errors.

    Raises
    ------
    Unsupported
        Another kind of tokenizer, or a pre-tokenizer that is not known exactly.
    ModelError
        The vocabulary, the merges or the scores are missing or do not fit together.
    """
    _check_types(metadata, path)
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    model = metadata.get("tokenizer.ggml.model")
    if model not in builders:
        raise Unsupported(f"{path} has a tokenizer of kind {shown(model)}; known: {', '.join(builders)}. {_ELSE}")
    tokens: list[str] = _entry(metadata, "tokens", path)
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{path} has {len(tokens)} tokens, but {len(types)} token types.")
    tokenizer = builders[model](metadata, tokens, types, path)
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            added = AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            (tokenizer.add_tokens if kind == _USER_DEFINED else tokenizer.add_special_tokens)([added])
            if tokenizer.token_to_id(token) != i:
                raise ModelError(f"{path}: token {token!r} stands twice in the vocabulary.")
    return tokenizer


def _check_types(metadata: dict[str, Any], path: Path) -> None:
    """Refuse entries that are not of the type that the format gives them."""
    for name, shape in _TYPES.items():
        value = metadata.get(f"tokenizer.ggml.{name}")
        outer, (inner,) = get_origin(shape) or shape, get_args(shape) or (shape,)
        items = value if isinstance(value, list) else [value]
        if value is not None and not (isinstance(value, outer) and all(isinstance(item, inner) for item in items)):
            raise ModelError(f"{path}: tokenizer.ggml.{name} is {shown(value)}, not {shape}: fetch the file again.")


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether a prompt starts with BOS: what the file says, else the custom of its kind."""
    told = metadata.get("tokenizer.ggml.add_bos_token")
    if told is not None:
        return bool(told)
    return metadata.get("tokenizer.ggml.model") == "llama" or _word_rule(metadata).add_bos


def _entry(metadata: dict[str, Any], name: str, path: Path) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not values:
        raise ModelError(f"{path} has no tokenizer.ggml.{name}.")
    return list(values)


def _word_rule(metadata: dict[str, Any]) -> WordRule:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        raise Unsupported(
            "the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre), so its tokens cannot be known. "
            + _ELSE
        )
    return word_rule(str(name))


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str], types: list[int], path: Path) -> tokenizers.Tokenizer:
    rule = _word_rule(metadata)
    # Unused entries only pad the vocabulary to the weights' shape; no text makes them, and they stand for none.
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    # The byte alphabet has no space, so the first one separates the two halves of a merge.
    merges = _entry(metadata, "merges", path)
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


def _sentencepiece_bpe(
    metadata: dict[str, Any], tokens: list[str], types: list[int], path: Path
) -> tokenizers.Tokenizer:
    scores: list[float] = _entry(metadata, "scores", path)
    if len(scores) != len(tokens):
        raise ModelError(f"{path} has {len(tokens)} tokens, but {len(scores)} scores.")
    for token, kind in zip(tokens, types, strict=True):
        if kind == _USER_DEFINED and _SPACE in token:
            raise Unsupported(f"{path} has the user-defined token {token!r}, with a space that is not read. {_ELSE}")
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    normal = {token: i for token, i in vocab.items() if types[i] == _NORMAL}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(normal, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_from_scores(normal: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put two pieces together to a third, the one with the best score first.

    SentencePiece has no list of merges: it joins the neighbours whose piece scores best, the leftmost of equals. For a
    piece that can be put together in several ways (runs of spaces) that is the way with the longest left half.
    """
    found = [
        (piece, cut)
        for piece in normal
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    found.sort(key=lambda merge: (-scores[normal[merge[0]]], normal[merge[0]], -merge[1]))
    return [(piece[:cut], piece[cut:]) for piece, cut in found]
