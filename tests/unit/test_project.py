"""The project's own promises: budgets, one version, links that lead somewhere, few dependencies."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import ramet

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.fixture(scope="module")
def budgets() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_budgets", ROOT / "tools" / "check_budgets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def function(lines: int, docstring_lines: int = 0) -> str:
    """Source of a function of so many lines, and a docstring beside them."""
    doc = ['    """' + "\n".join(["text"] * docstring_lines) + '"""'] if docstring_lines else []
    return "\n".join(["def f():", *doc, *["    x = 1"] * (lines - 1)]) + "\n"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (function(60), []),
        (function(61), [False]),
        (function(75), [False]),
        (function(76), [True]),
        (function(60, docstring_lines=40), []),
        ("x = 1\n" * 500, []),
        ("x = 1\n" * 501, [False]),
        ("x = 1\n" * 601, [True]),
    ],
)
def test_budgets_warn_above_the_budget_and_fail_above_the_limit(
    budgets: ModuleType, tmp_path: Path, source: str, found: list[bool]
) -> None:
    (tmp_path / "module.py").write_text(source)
    assert [finding.is_error for finding in budgets.check([tmp_path])] == found
    assert budgets.main([str(tmp_path)]) == int(True in found)


def test_package_and_metadata_have_one_version() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == ramet.__version__


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]
    assert [target for target in links if not (page.parent / target).exists()] == []


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "design"
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8")))
    assert listed == {p.name for p in folder.glob("*.md")} - {"README.md"}


def test_core_dependencies_are_few_and_leave_torch_free() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 12
    assert "torch>=2.11" in project["dependencies"]
