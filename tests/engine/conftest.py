"""The real model, loaded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from real_model import RealModel

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_135m_greedy_fp32.json"


@pytest.fixture(scope="session")
def smollm() -> RealModel:
    return RealModel("smollm2-135m", dtype="float32")


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    return json.loads(GOLDEN.read_text())["items"]
