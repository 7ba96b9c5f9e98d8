"""What a throughput benchmark asks of the engine: random prompts of fixed lengths, each with n samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ramet.errors import InvalidArgument
from ramet.sampling_params import SamplingParams


@dataclass(frozen=True)
class Workload:
    """Random prompts, each with ``n`` samples of exactly ``output_len`` tokens.

    Parameters
    ----------
    num_prompts : int
    n : int
        Samples of a prompt.
    input_len, output_len : int
        Tokens.
    prefix_len : int, default 0
        How many first tokens of ``input_len`` all prompts share.
    temperature : float, default 1.0
    seed : int, default 0
        Of the prompts and of the samples.
    """

    num_prompts: int
    n: int
    input_len: int
    output_len: int
    prefix_len: int = 0
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "n", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; allowed: an integer of at least 1.")
        if not 0 <= self.prefix_len < self.input_len:
            raise InvalidArgument(
                f"prefix_len is {self.prefix_len}; allowed: 0 to {self.input_len - 1} (less than input_len)."
            )

    @property
    def unique_tokens(self) -> int:
        """Prompt tokens that have to be computed."""
        return self.prefix_len + self.num_prompts * (self.input_len - self.prefix_len)

    @property
    def logical_tokens(self) -> int:
        """Prompt tokens that the samples see, counted for each sample."""
        return self.num_prompts * self.n * self.input_len

    def prompts(self, vocab_size: int, *, warm_up: bool = False) -> list[list[int]]:
        """Return the token ids of all prompts; those of the warm-up are others."""
        draw = np.random.default_rng([self.seed % 2**64, int(warm_up)])
        prefix = draw.integers(0, vocab_size, self.prefix_len)
        bodies = draw.integers(0, vocab_size, (self.num_prompts, self.input_len - self.prefix_len))
        return [[*prefix.tolist(), *body.tolist()] for body in bodies]

    def params(self, index: int) -> SamplingParams:
        """Return the sampling parameters of one prompt."""
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            max_tokens=self.output_len,
            ignore_eos=True,
            seed=(self.seed + index) % 2**64,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for the report."""
        return asdict(self)
