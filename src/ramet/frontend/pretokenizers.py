"""The pre-tokenizers that GGUF files name in ``tokenizer.ggml.pre``.

A GGUF file holds a vocabulary and merges, but only the *name* of the rule that cuts text into words before they are
merged. Another rule gives other tokens without any error, so a name that is not listed here is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from ramet.errors import Unsupported

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class WordRule:
    """How text becomes words, and what goes with it.

    Attributes
    ----------
    words : callable
        Makes the pre-tokenizer, byte-level included.
    normalizer : callable, optional
        Makes the normalizer that the original tokenizer applies first.
    ignore_merges : bool
        A word that is a token itself is taken whole, whatever the merges say.
    add_bos : bool
        Whether a prompt starts with BOS where the file does not say.
    """

    words: Callable[[], PreTokenizer]
    normalizer: Callable[[], Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(pattern: str) -> Callable[[], PreTokenizer]:
    def make() -> PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return make


_RULES = {
    "gpt-2": WordRule(_gpt2),
    "smollm": WordRule(_single_digits),
    "starcoder": WordRule(_single_digits),
    "llama-bpe": WordRule(_pattern(_LLAMA3), ignore_merges=True, add_bos=True),
    "qwen2": WordRule(_pattern(_QWEN2), normalizer=normalizers.NFC),
    "tekken": WordRule(_pattern(_TEKKEN), ignore_merges=True, add_bos=True),
}
_ALIASES = {
    "gpt2": "gpt-2",
    "phi-2": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}


def word_rule(name: str) -> WordRule:
    """Return the rule for a ``tokenizer.ggml.pre`` name.

    Raises
    ------
    Unsupported
        The name is not one that can be followed exactly.
    """
    rule = _RULES.get(_ALIASES.get(name, name))
    if rule is None:
        known = ", ".join(sorted([*_RULES, *_ALIASES]))
        raise Unsupported(
            f"the GGUF file's pre-tokenizer is {name!r}, which is not known exactly; known: {known}. "
            "Give the original tokenizer instead: tokenizer='folder or hub name'."
        )
    return rule
