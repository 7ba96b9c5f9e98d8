"""The table of measured costs: kept whole by a round trip, chosen by name, refused when it is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ramet.attention.cost_table import ENVIRONMENT, Costs, CostTable, load, shipped, table_for
from ramet.errors import InvalidArgument

COSTS = Costs("triton", 128, 2, 5.0, 4.6, 0.6, 1.0, 4e6, 0.15, 128)
TABLE = CostTable("Some GPU", 100, "a test", (COSTS, dataclasses.replace(COSTS, head_dim=64, item_us=3.0)))


def test_a_table_survives_the_file(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "table.json")
    assert load(tmp_path / "table.json") == TABLE


def test_the_nearest_entry_of_the_backend_is_looked_up() -> None:
    assert TABLE.lookup("triton", 64, 2).item_us == 3.0
    assert TABLE.lookup("triton", 64, 4).item_us == 4.6  # as many bytes as 128 elements of two
    assert TABLE.lookup("triton", 256, 2).item_us == 4.6
    with pytest.raises(InvalidArgument, match=r"no entry of backend 'fa9' \(it has: triton\)"):
        TABLE.lookup("fa9", 64, 2)


def test_the_environment_names_a_table_and_the_shipped_one_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert table_for("NVIDIA H200") == shipped("NVIDIA H200")
    assert table_for("a card without a table").device == "NVIDIA H200"
    TABLE.save(tmp_path / "mine.json")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "mine.json"))
    assert table_for("NVIDIA H200") == TABLE


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Costs) if f.name != "backend"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1"], ids=str)
def test_costs_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=field):
        dataclasses.replace(COSTS, **{field: value})


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"costs": None}, {"costs": [{"backend": "triton"}]}, {"more": 1}, {"costs": [{"unknown": 1}]}],
    ids=str,
)
def test_files_that_are_no_tables_are_refused_with_their_path(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "table.json"
    TABLE.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InvalidArgument, match="table.json"):
        load(path)
    with pytest.raises(InvalidArgument, match="nowhere.json"):
        load(tmp_path / "nowhere.json")
