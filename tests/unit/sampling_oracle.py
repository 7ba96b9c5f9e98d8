"""A plain sampler in float64 and Python: the whole order for one row, written from the documentation alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ramet.sampling_params import SamplingParams

M64, M32 = 2**64 - 1, 2**32 - 1


def _mix64(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & M64
    return z ^ (z >> 31)


def noise(seed: int, sample: int, position: int, vocab_size: int) -> np.ndarray:
    """Return the Gumbel noise of every token, float64."""
    golden = 0x9E3779B97F4A7C15
    stream = _mix64((_mix64((seed % 2**64) + golden & M64) + (sample + 1) * golden) & M64)
    key = _mix64((stream + (position + 1) * 0xD1B54A32D192ED03) & M64)
    mask = np.uint64(M32)
    x = np.arange(vocab_size, dtype=np.uint64) * np.uint64((key & M32) | 1) + np.uint64(key >> 32) & mask
    x = (x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D) & mask
    x = (x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B) & mask
    x = x ^ (x >> np.uint64(16))
    return -np.log(-np.log1p(-np.minimum((x + 0.5) / 2.0**32, 1 - 2.0**-24)))


@dataclass
class Request:
    """One row: what it asks, and what it has said."""

    params: SamplingParams
    seed: int = 0
    sample: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    eos: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    grammar: np.ndarray | None = None

    @property
    def position(self) -> int:
        """Position of the next token."""
        return len(self.prompt) + len(self.output)


@dataclass
class Answer:
    """What the oracle found for a row."""

    scores: np.ndarray  #: perturbed processed scores, -inf where a token is filtered out
    processed: np.ndarray  #: processed log-probabilities
    fragile: bool  #: a top-p or min-p cut-off is so near to a token that rounding decides


def edited(logits: np.ndarray, r: Request) -> np.ndarray:
    """Return the logits after masks, biases and penalties."""
    p, z, size = r.params, logits.astype(np.float64).copy(), len(logits)
    forbidden = set() if r.grammar is None else set(np.flatnonzero(~r.grammar).tolist())
    if p.allowed_token_ids is not None:
        forbidden |= set(range(size)) - set(p.allowed_token_ids)
    for word in r.bad_words:
        begin = list(word[:-1])
        if not begin or list(r.output[-len(begin) :]) == begin:
            forbidden.add(word[-1])
    if len(r.output) < p.min_tokens:
        forbidden |= set(p.stop_token_ids) | set(r.eos)
    for token, bias in (p.logit_bias or {}).items():
        z[token] += bias
    for token in set(r.prompt) | set(r.output):
        z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
    for token, count in Counter(r.output).items():
        z[token] -= p.frequency_penalty * count + p.presence_penalty
    z[list(forbidden)] = -np.inf
    return z


def answer(logits: np.ndarray, r: Request) -> Answer:
    """Return scores and processed log-probabilities of the row's next token."""
    p, z = r.params, edited(logits, r)
    fragile = False
    if p.greedy:
        return Answer(z, _log_softmax(z), False)
    z = (z - z.max()) / p.temperature
    keep = z > -np.inf
    order = np.argsort(-z, kind="stable")
    if 0 < p.top_k < len(z):
        keep &= z >= z[order[p.top_k - 1]]
    if p.top_p < 1.0:
        mass = np.cumsum(np.where(keep, np.exp(z), 0.0)[order])
        share = mass / mass[-1]
        last = min(int(np.searchsorted(share, p.top_p)), len(z) - 1)
        fragile |= bool((np.abs(share - p.top_p) < 1e-5).any())
        keep &= z >= z[order[last]]
    if p.min_p > 0.0:
        fragile |= bool((np.abs(z - np.log(p.min_p)) < 1e-4 * (1 + 1 / p.temperature)).any()) and p.min_p < 1.0
        keep &= z >= np.log(p.min_p)
    z = np.where(keep, z, -np.inf)
    return Answer(z + noise(r.seed, r.sample, r.position, len(z)), _log_softmax(z), fragile)


def _log_softmax(z: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return z - z.max() - np.log(np.exp(z - z.max()).sum())
