"""Keep files and functions small: a file that outgrows its budget has two jobs, and so has a function.

A file may have 500 lines and a function 60 (its docstring not counted); up to 600 and 75 is a warning,
more is an error.

Usage: ``python tools/check_budgets.py [PATH ...]`` (default: src tests tools benchmarks).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILE_BUDGET, FILE_LIMIT = 500, 600
FUNCTION_BUDGET, FUNCTION_LIMIT = 60, 75
DEFAULT_PATHS = ("src", "tests", "tools", "benchmarks")


class Finding(NamedTuple):
    """Something longer than its budget."""

    where: str
    what: str
    lines: int
    budget: int
    limit: int

    @property
    def is_error(self) -> bool:
        return self.lines > self.limit

    def __str__(self) -> str:
        level = "error" if self.is_error else "warning"
        return f"{self.where}: {level}: {self.what} has {self.lines} lines (budget {self.budget}, limit {self.limit})"


def _docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(function, clean=False) is None:
        return 0
    doc = function.body[0]
    return (doc.end_lineno or doc.lineno) - doc.lineno + 1


def _check_file(path: Path) -> Iterator[Finding]:
    source = path.read_text(encoding="utf-8")
    length = len(source.splitlines())
    if length > FILE_BUDGET:
        yield Finding(str(path), "the file", length, FILE_BUDGET, FILE_LIMIT)
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
            if lines > FUNCTION_BUDGET:
                yield Finding(f"{path}:{node.lineno}", f"{node.name}()", lines, FUNCTION_BUDGET, FUNCTION_LIMIT)


def check(paths: list[Path]) -> list[Finding]:
    """Return everything over budget in the Python files below `paths`."""
    files = sorted(f for p in paths for f in ([p] if p.is_file() else p.rglob("*.py")))
    return [finding for file in files for finding in _check_file(file)]


def main(arguments: list[str]) -> int:
    """Print the findings; 1 when one of them is an error."""
    findings = check([Path(a) for a in arguments or DEFAULT_PATHS])
    for finding in findings:
        print(finding)
    errors = sum(f.is_error for f in findings)
    print(f"budgets: {errors} errors, {len(findings) - errors} warnings")
    return int(errors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
