"""What attention costs on a device, as measured: the planner's gates and splits come from here, not from guesses.

A table is a JSON file. One for the H200 ships with the package; ``ramet bench attention --calibrate`` measures another
card and writes one, and the environment variable ``RAMET_ATTENTION_COSTS`` names the file to use::

    {"format": 1, "device": "NVIDIA H200", "sm_count": 132, "source": "how and when it was measured",
     "costs": [{"backend": "triton", "head_dim": 128, "kv_bytes": 2, "launch_us": 5.0, ...}, ...]}
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

from ramet.errors import InvalidArgument

ENVIRONMENT = "RAMET_ATTENTION_COSTS"

FORMAT = 1
"""Version of the file's format."""

FOLDER = Path(__file__).parent / "costs"


@dataclass(frozen=True)
class Costs:
    """Measured costs of one backend's kernels for one head size and element size of K and V.

    Parameters
    ----------
    backend : str
    head_dim : int
    kv_bytes : int
        Bytes of one element of K and V.
    launch_us : float
        Attention with next to nothing to do, its merge included.
    item_us : float
        One more work item on an SM, without its tokens: the slope over the number of items at constant tokens.
    shared_block_us : float
        64 tokens of one KV head for one full tile of query rows, on one SM: the slope over the tokens of a long node
        with so many rows that arithmetic is the limit.
    row_block_us : float
        64 tokens of one KV head for the tile of one row, on one SM: likewise, with one row per node and few CTAs.
    bytes_per_us : float
        K and V streamed with all SMs at work: the slope over the tokens of many long tails.
    partial_ns : float
        One partial of one query token and head, written, read and merged: the slope over the number of splits.
    min_split_tokens : int
        A shorter split never paid.

    Raises
    ------
    InvalidArgument
        A number that is not positive and finite.
    """

    backend: str
    head_dim: int
    kv_bytes: int
    launch_us: float
    item_us: float
    shared_block_us: float
    row_block_us: float
    bytes_per_us: float
    partial_ns: float
    min_split_tokens: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "backend":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InvalidArgument(f"costs: {field.name} is {value!r}; it must be a positive, finite number.")


@dataclass(frozen=True)
class CostTable:
    """The costs on one device.

    Parameters
    ----------
    device : str
        Its name, as ``torch.cuda.get_device_name`` gives it.
    sm_count : int
    source : str
        How and when it was measured, for whoever reads an explanation.
    costs : tuple of Costs
    """

    device: str
    sm_count: int
    source: str
    costs: tuple[Costs, ...]

    def lookup(self, backend: str, head_dim: int, kv_bytes: int) -> Costs:
        """The entry of the backend whose bytes per head come closest.

        Raises
        ------
        InvalidArgument
            The table has no entry of that backend.

        Examples
        --------
        >>> shipped("NVIDIA H200").lookup("triton", head_dim=128, kv_bytes=2).head_dim
        128
        """
        of_backend = [costs for costs in self.costs if costs.backend == backend]
        if not of_backend:
            known = ", ".join(sorted({costs.backend for costs in self.costs})) or "none"
            raise InvalidArgument(
                f"the cost table of {self.device} has no entry of backend {backend!r} (it has: {known}); measure one "
                "with `ramet bench attention --calibrate`."
            )
        wanted = math.log2(head_dim * kv_bytes)
        return min(of_backend, key=lambda costs: abs(math.log2(costs.head_dim * costs.kv_bytes) - wanted))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON, for :func:`load`."""
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")


def load(path: str | os.PathLike[str]) -> CostTable:
    """Read a table that :meth:`CostTable.save` wrote.

    Raises
    ------
    InvalidArgument
        The file cannot be read, is of another format, or a field is missing, unknown or out of range.
    """
    try:
        data = json.loads(Path(path).read_text())
        version = data.pop("format", None)
        if version != FORMAT:
            raise InvalidArgument(f"{path} has format {version!r}; allowed: {FORMAT}.")
        return CostTable(**{**data, "costs": tuple(Costs(**costs) for costs in data["costs"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{path} is no table of attention costs: {error}") from error


@lru_cache(maxsize=16)
def shipped(device: str) -> CostTable:
    """The table that comes with the package for a device; the H200's where there is none of its own.

    Examples
    --------
    >>> shipped("NVIDIA H200").sm_count
    132
    """
    own = FOLDER / (device.lower().replace(" ", "_") + ".json")
    return load(own if own.is_file() else FOLDER / "nvidia_h200.json")


def table_for(device: str) -> CostTable:
    """The table to use on a device: the file that ``RAMET_ATTENTION_COSTS`` names, else the shipped one.

    Parameters
    ----------
    device : str
        Name of the device.
    """
    path = os.environ.get(ENVIRONMENT)
    return _load_once(path) if path else shipped(device)


@lru_cache(maxsize=4)
def _load_once(path: str) -> CostTable:
    return load(path)
