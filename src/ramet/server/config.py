"""Settings of the server, as opposed to those of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ramet.errors import InvalidArgument, known_fields_only, shown
from ramet.sampling_params import MAX_N

UnknownFields = Literal["refuse", "warn"]


@known_fields_only
@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the server; checked when made.

    Parameters
    ----------
    host : str, default "0.0.0.0"
        Address to listen on; 127.0.0.1 is reached from this machine alone.
    port : int, default 8000
        0 takes a free one and logs it.
    served_model_name : list of str, optional
        Names under which clients ask for the model; by default the name it was loaded by.
    api_key : list of str, optional
        Keys that clients must send as 'Authorization: Bearer KEY'; also from RAMET_API_KEY. Not asked for by /health,
        /version and /metrics.
    allowed_origins : list of str, optional
        Origins that browsers may call from (CORS); '*' is all of them. None by default.
    max_n : int, default 16384
        Largest n of a request.
    max_logprobs : int, default 20
        Largest number of alternatives a token is reported with.
    max_queue : int, default 32768
        Samples that may wait besides those that run; a group that does not fit is refused whole, with status 429.
    max_body_bytes : int, default 33554432
        Longest body of a request.
    max_backlog : int, default 65536
        Tokens of a stream that may wait for its reader; one that falls further behind is aborted.
    write_timeout : float, default 60.0
        Seconds after which a stream whose reader takes nothing is broken off.
    unknown_fields : {"refuse", "warn"}, default "refuse"
        What happens to requests with fields that nobody knows.
    shutdown_timeout : float, default 30.0
        Seconds that requests under way are given to finish when the server is asked to end; then they are aborted.
    access_log : bool, default True
        Log a line for every request.
    """

    host: str = "0.0.0.0"
    port: int = 8000
    served_model_name: list[str] | tuple[str, ...] = ()
    api_key: list[str] | tuple[str, ...] = ()
    allowed_origins: list[str] | tuple[str, ...] = ()
    max_n: int = MAX_N
    max_logprobs: int = 20
    max_queue: int = 32_768
    max_body_bytes: int = 32 << 20
    max_backlog: int = 65_536
    write_timeout: float = 60.0
    unknown_fields: UnknownFields = "refuse"
    shutdown_timeout: float = 30.0
    access_log: bool = True

    def __post_init__(self) -> None:
        ranges = {
            "port": (0, 65_535),
            "max_n": (1, MAX_N),
            "max_logprobs": (0, 2**31 - 1),
            "max_queue": (0, 2**31 - 1),
            "max_body_bytes": (1, 2**31 - 1),
            "max_backlog": (1, 2**31 - 1),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise self._refuse(name, f"an integer from {low} to {high:,}")
        for name in ("shutdown_timeout", "write_timeout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e9:
                raise self._refuse(name, "seconds, at least 0")
        if self.unknown_fields not in ("refuse", "warn"):
            raise self._refuse("unknown_fields", "refuse, warn")
        for name in ("served_model_name", "api_key", "allowed_origins"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif not all(isinstance(item, str) and item for item in value):
                raise self._refuse(name, "non-empty strings")

    def _refuse(self, name: str, allowed: str) -> InvalidArgument:
        return InvalidArgument(f"{name} is {shown(getattr(self, name))}; allowed: {allowed}.")
