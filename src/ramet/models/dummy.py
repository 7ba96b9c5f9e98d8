"""Random weights made from the configuration alone (``load_format="dummy"``)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ramet.models.spec import ModelSpec
from ramet.models.weights import expected_shapes


class DummyWeights:
    """Seeded normal weights: a tensor depends on the seed and its name, not on the order of reading.

    Parameters
    ----------
    spec : ModelSpec
    seed : int, default 0
    """

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        self._shapes = expected_shapes(spec)
        self._seed = seed

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed((self._seed ^ zlib.crc32(name.encode())) % 2**63)
        # Variance 1 / in_features keeps activations of order one through any number of layers.
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5
