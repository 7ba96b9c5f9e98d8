"""A byte-level BPE in plain Python, and the packages whose data the tests read."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from tokenizers import pre_tokenizers


def package_file(package: str, pattern: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs the package {package}, installed with --no-deps")
    return next(Path(spec.submodule_search_locations[0]).glob(pattern))


class ReferenceBPE:
    """Byte-level BPE in plain Python: cut, map bytes to characters, merge the pair of lowest rank."""

    GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

    def __init__(self, metadata: dict) -> None:
        self.vocab = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.rank = {tuple(m.split(" ")): r for r, m in enumerate(metadata["tokenizer.ggml.merges"])}
        controls = [t for t, k in zip(self.vocab, metadata["tokenizer.ggml.token_type"], strict=True) if k == 3]
        self.special = regex.compile("(" + "|".join(map(regex.escape, sorted(controls, key=len, reverse=True))) + ")")
        self.controls = set(controls)
        keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in keep]
        self.char = {b: chr(b) for b in keep} | {b: chr(256 + k) for k, b in enumerate(others)}
        self.word = lru_cache(None)(self._word)

    def _word(self, word: str) -> list[int]:
        parts = [self.char[b] for b in word.encode()]
        while len(parts) > 1:
            rank, k = min((self.rank.get((a, b), 1 << 30), k) for k, (a, b) in enumerate(pairwise(parts)))
            if rank == 1 << 30:
                break
            parts[k : k + 2] = [parts[k] + parts[k + 1]]
        return [self.vocab[p] for p in parts]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self.special.split(text):
            if piece in self.controls:
                ids.append(self.vocab[piece])
                continue
            for run in regex.findall(r"\p{N}|\P{N}+", piece):
                for word in regex.findall(self.GPT2, run):
                    ids += self.word(word)
        return ids


def alphabet() -> list[str]:
    """The 256 characters that stand for bytes, as the library orders them."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())
